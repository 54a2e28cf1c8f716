"""Workers on other machines: an agent on each starts them, and sends back what they write.

protocol.py     the messages between a launcher and its agents
channel.py      carries messages over a pair of byte streams
agent.py        the process on the other machine: starts workers, follows their files
environment.py  which variables of an engine workers do not get
orphan.py       a process ends with the one that started it
callback.py     how an agent that an engine has started finds its launcher, and proves that it is invited
invite.py       how do workers of a further machine join a running run? Tokens, and who is let in
gather.py       the agents of an engine's job, grouped by machine
driver.py       the launcher's side: waits for agents, checks them, talks to them
processes.py    the workers that agents have started, as the launcher watches and ends them
member_relay.py the agent's side of members that may be lost: passes on what they and the launcher say
board.py        the launcher's side of that
reach.py        the agent's side of connections: which addresses of others does this machine reach?
pairs.py        the launcher's side: which pairs of machines can connect, and where do workers meet?
"""
