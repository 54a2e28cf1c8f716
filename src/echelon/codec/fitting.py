"""Refuses combinations that a codec does not support, before anything starts, with a fix. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from echelon.codec.codec import CODECS, Codec, StandIn, Summed
from echelon.codec.codecs.auto import AutoCodec
from echelon.codec.codecs.between import Between
from echelon.codec.codecs.none import NoCodec
from echelon.errors import ConfigError

_WHERE = "--codec"


def inner_of(codec: Codec) -> Codec:
    """The codec that writes: the inner one of `between`, or the codec itself."""
    return codec.inner if isinstance(codec, Between) else codec


def same_codec(one: str, other: str) -> bool:
    """Whether two texts name the same codec."""
    try:
        first, second = CODECS.build(one), CODECS.build(other)
    except ConfigError:  # from a package that is not installed now
        return False
    alike = isinstance(first, Between) == isinstance(second, Between)
    return alike and inner_of(first) == inner_of(second)


def refuse_momentum(codec: Codec, own: float, optimizer: str) -> None:
    """Refuse an optimizer with momentum if the codec applies momentum too."""
    inner = inner_of(codec)
    if inner.momentum and own:
        raise ConfigError(
            f"momentum would be applied twice: {inner.momentum:g} in codec {inner.name}, "
            f"{own:g} in {optimizer}",
            where="--codec and the optimizer",
            fix=f"use SGD without momentum (--optimizer sgd --momentum 0), because {inner.name} applies it "
            f"before it chooses what to send; or use {inner.name}(momentum=0)",
        )


def goes_on(text: str) -> bool:
    """Whether the others can go on with this codec when a worker is lost; with a rail, its sites cannot."""
    return not isinstance(CODECS.build(text, where=_WHERE), Between)


def refuse_for_weights(text: str, policy: str) -> None:
    """Refuse codecs for policies that average weights, because codecs write gradients."""
    codec = CODECS.build(text, where=_WHERE)
    if not isinstance(codec, (NoCodec, AutoCodec)):
        raise ConfigError(
            f"codec {codec.name} writes gradients, and sync {policy} averages weights",
            where=_WHERE,
            fix="use --codec none, or --sync full, or a policy with a server",
        )


def check_sites(sites: Sequence[Sequence[int]]) -> None:
    """Refuse a codec between sites if there are fewer than two sites."""
    if len(sites) < 2:
        raise ConfigError(
            "codec between(...) needs two sites or more",
            where=_WHERE,
            fix="give the number of workers of each site, such as --groups 2,2; or leave out between(...)",
        )


def refuse_transport(transport: str) -> None:
    """Refuse a transport without subgroups for a codec between sites."""
    if transport == "c10d":
        raise own_transports_only()


def own_transports_only() -> ConfigError:
    """The error for a codec between sites on torch.distributed."""
    return ConfigError(
        "codec between(...) works on Echelon's own transports, not on torch.distributed",
        where="--transport",
        fix="use auto or tcp",
    )


def refuse_factors(codec: Codec, factors: str) -> None:
    """Refuse --factors always with a codec: an encoded gradient is not sent as factors."""
    if factors == "always" and not isinstance(codec, (NoCodec, AutoCodec)):
        raise ConfigError(
            f"a gradient is sent either as factors or by codec {codec.name}, not both",
            where="--factors always",
            fix="use --factors auto or never, or --codec none",
        )


def refuse_sums(codec: Codec, servers: int) -> None:
    """Refuse codecs that write bytes for servers that only sum (sync full)."""
    inner = inner_of(codec)
    if servers and not isinstance(inner, (Summed, AutoCodec)):
        raise ConfigError(
            f"servers with sync full can only add numbers, and codec {inner.name} writes bytes",
            where="--servers and --codec",
            fix="leave out --servers; or use random-k or power-sgd; or a policy whose servers keep weights",
        )


def served_codec(text: str) -> Codec | None:
    """The codec of gradients pushed to a server; None if they are sent unencoded."""
    codec = CODECS.build(text, where=_WHERE)
    if isinstance(codec, NoCodec):
        return None
    if isinstance(codec, Summed):
        raise ConfigError(
            f"codec {codec.name} writes numbers that are added up between workers, "
            "but a parameter server reads each push by itself",
            where=_WHERE,
            fix='use "top-k(ratio=0.01)", or --sync full',
        )
    if isinstance(codec, StandIn):
        raise ConfigError(
            f"codec {codec.name} is for links between workers, but here they talk to a parameter server",
            where=_WHERE,
            fix='name the codec itself, for example "top-k(ratio=0.01)"',
        )
    return codec
