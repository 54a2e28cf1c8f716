"""Which machines may join a running run, and what are they told? For runs whose workers have agents."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from echelon.config.schema import RunSettings
from echelon.errors import EchelonError
from echelon.observe.run_folder import RunFolder
from echelon.plan.plan import Plan
from echelon.start import remote
from echelon.start.agents.driver import ConnectedAgent
from echelon.start.agents.invite import Invitations, Joiner
from echelon.start.agents.protocol import Begin, JoinRequest, Refusal
from echelon.start.further import ScriptDigest, script_digests
from echelon.start.members import Members


class FurtherMachines:
    """The door of one run."""

    def __init__(
        self,
        folder: RunFolder,
        plan: Plan,
        settings: RunSettings,
        program: Sequence[str],
        agents: Sequence[ConnectedAgent],
        members: Members,
    ) -> None:
        self._folder, self._plan, self._settings = folder, plan, settings
        self._program, self._agents, self._members = program, agents, members
        self._script = ScriptDigest(program)
        self._digests = script_digests(program, Path.cwd())
        self._known = list(agents)
        self.invitations = Invitations(agents[0].shared, self._decide)

    def _decide(self, asked: JoinRequest) -> tuple[list[int], str, str]:
        """Slots for a machine's workers; or why it cannot join, and what would help."""
        if any(agent.node == asked.node and not agent.gone for agent in self._known):
            return [], f"a machine named {asked.node} is in the run already", "give this one another --name"
        if name := self._script.changed:
            return [], f"{name} has changed since the run was started", "undo the change, or start again"
        slots, refusal = self._members.add(asked.workers, elsewhere=True)
        return slots, refusal, "see docs/reference/membership.md"

    def joiners(self) -> list[tuple[Joiner, Begin]]:
        """The machines that were let in since the last call, and what they are told."""
        found = []
        for joiner in self.invitations.take():
            self._known.append(joiner.agent)
            try:
                begin = remote.start_of_joiner(
                    joiner,
                    self._agents,
                    self._plan,
                    self._settings,
                    self._program,
                    self._folder,
                    self._members,
                    self._digests,
                )
            except EchelonError as error:
                joiner.agent.send(Refusal(message=error.message, where=error.where, fix=error.fix))
                for slot in joiner.slots:
                    self._members.ended(slot, 1, error.message)
                continue
            found.append((joiner, begin))
        return found

    def close(self) -> None:
        """Let nobody in any more."""
        self.invitations.close()
