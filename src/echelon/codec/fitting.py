"""What a codec cannot be combined with: found before anything is started, said with the remedy. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from echelon.codec.codec import CODECS, Codec, StandIn, Summed
from echelon.codec.codecs.auto import AutoCodec
from echelon.codec.codecs.between import Between
from echelon.codec.codecs.none import NoCodec
from echelon.errors import ConfigError

_WHERE = "--codec"


def inner_of(codec: Codec) -> Codec:
    """The codec that writes: between sites, or everywhere."""
    return codec.inner if isinstance(codec, Between) else codec


def same_codec(one: str, other: str) -> bool:
    """Whether two texts ask for the same codec."""
    try:
        first, second = CODECS.build(one), CODECS.build(other)
    except ConfigError:  # of somebody's package, which is not here now
        return False
    alike = isinstance(first, Between) == isinstance(second, Between)
    return alike and inner_of(first) == inner_of(second)


def refuse_momentum(codec: Codec, own: float, optimizer: str) -> None:
    """Refuse momentum in the optimizer besides the codec's."""
    inner = inner_of(codec)
    if inner.momentum and own:
        raise ConfigError(
            f"momentum would be applied twice: {inner.momentum:g} in codec {inner.name}, "
            f"{own:g} in {optimizer}",
            where="--codec and the optimizer",
            fix=f"use SGD without momentum (--optimizer sgd --momentum 0), for {inner.name} applies it "
            f"before it chooses what to send; or say {inner.name}(momentum=0)",
        )


def refuse_for_weights(text: str, policy: str) -> None:
    """Codecs write gradients: policies that average weights send them as they are."""
    codec = CODECS.build(text, where=_WHERE)
    if not isinstance(codec, (NoCodec, AutoCodec)):
        raise ConfigError(
            f"codec {codec.name} writes gradients, and sync {policy} averages weights",
            where=_WHERE,
            fix="use --codec none, or sync full or a policy with a server",
        )


def check_sites(sites: Sequence[Sequence[int]]) -> None:
    """Refuse fewer than two sites for a codec between them."""
    if len(sites) < 2:
        raise ConfigError(
            "codec between(...) needs two sites or more",
            where=_WHERE,
            fix="say which workers form a site, --groups 2,2, or give the codec without between(...)",
        )


def refuse_transport(transport: str) -> None:
    """Refuse a transport without groups of some workers, for a codec between sites."""
    if transport == "c10d":
        raise own_transports_only()


def own_transports_only() -> ConfigError:
    """What is wrong with torch.distributed for a codec between sites."""
    return ConfigError(
        "codec between(...) works on Echelon's own transports, not on torch.distributed",
        where="--transport",
        fix="use auto or tcp",
    )


def refuse_factors(codec: Codec, factors: str) -> None:
    """Gradients that are encoded do not travel as factors."""
    if factors == "always" and not isinstance(codec, (NoCodec, AutoCodec)):
        raise ConfigError(
            f"a gradient travels as factors or by codec {codec.name}, not both",
            where="--factors always",
            fix="use --factors auto or never, or --codec none",
        )


def refuse_sums(codec: Codec, servers: int) -> None:
    """Servers that sum for the workers (sync full) add numbers: what is not numbers cannot go there."""
    inner = inner_of(codec)
    if servers and not isinstance(inner, (Summed, AutoCodec)):
        raise ConfigError(
            f"servers with sync full only add numbers up, and codec {inner.name} writes bytes",
            where="--servers and --codec",
            fix="start no servers; or use random-k or power-sgd; or a policy that servers keep weights for",
        )


def served_codec(text: str) -> Codec | None:
    """The codec that gradients are pushed to a server with; None if they are sent as they are."""
    codec = CODECS.build(text, where=_WHERE)
    if isinstance(codec, NoCodec):
        return None
    if isinstance(codec, Summed):
        raise ConfigError(
            f"codec {codec.name} writes numbers that workers add up on their way, "
            "and a parameter server reads each push by itself",
            where=_WHERE,
            fix='use "top-k(ratio=0.01)", or --sync full',
        )
    if isinstance(codec, StandIn):
        raise ConfigError(
            f"codec {codec.name} is about links between workers, and here they talk to a parameter server",
            where=_WHERE,
            fix='name the codec itself, "top-k(ratio=0.01)" for example',
        )
    return codec
