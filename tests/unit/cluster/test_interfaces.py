import ipaddress
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.cluster.interfaces import (
    Interface,
    choose,
    default_route,
    interfaces,
    is_loopback,
    is_virtual,
    owning,
    towards,
)
from echelon.errors import ConfigError


def _interface(name: str, address: str, *, up: bool = True) -> Interface:
    return Interface(
        name=name,
        address=address,
        family="ipv6" if ":" in address else "ipv4",
        up=up,
        loopback=is_loopback(address),
        virtual=is_virtual(name),
    )


MACHINE = [
    _interface("docker0", "172.17.0.1"),
    _interface("lo", "127.0.0.1"),
    _interface("lo", "::1"),
    _interface("eth0", "10.0.0.2"),
    _interface("eth0", "fd00::2"),
    _interface("eth0", "fe80::1%eth0"),
    _interface("eth1", "10.1.0.2", up=False),
]


def test_the_interface_with_the_source_address_is_chosen():
    choice = choose(MACHINE, "10.0.0.2", host="node-b", peer="10.0.0.9")
    assert (choice.name, choice.address) == ("eth0", "10.0.0.2")
    assert choice.reason == "the route to node-b (10.0.0.9) leaves by eth0"


def test_address_given_as_host_is_named_once_in_the_reason():
    assert choose(MACHINE, "10.0.0.2", host="10.0.0.9", peer="10.0.0.9").reason.count("10.0.0.9") == 1


def test_a_container_bridge_is_chosen_only_by_its_own_address_and_the_reason_says_so():
    choice = choose(MACHINE, "172.17.0.1", host="box", peer="172.17.0.5")
    assert choice.name == "docker0"
    assert "container" in choice.reason


@settings(deadline=None, max_examples=50)
@given(source=st.sampled_from([entry.address for entry in MACHINE if entry.name != "docker0"]))
def test_no_other_source_address_leads_to_the_bridge(source):
    choice = choose(MACHINE, source, host="peer", peer="198.51.100.1")
    assert choice.name != "docker0"
    assert "container" not in choice.reason


def test_of_a_bridge_and_a_real_interface_with_one_address_the_real_one_is_chosen():
    twice = [_interface("br-1a2b", "10.0.0.2"), _interface("eth0", "10.0.0.2")]
    assert choose(twice, "10.0.0.2", host="peer", peer="10.0.0.9").name == "eth0"


def test_of_two_interfaces_with_one_address_the_one_that_is_up_is_chosen():
    twice = [_interface("eth0", "10.0.0.2", up=False), _interface("eth1", "10.0.0.2")]
    assert choose(twice, "10.0.0.2", host="peer", peer="10.0.0.9").name == "eth1"


def test_the_reason_says_that_an_interface_is_down():
    assert "down" in choose(MACHINE, "10.1.0.2", host="peer", peer="10.1.0.9").reason


@pytest.mark.parametrize("own_name", ["node-a", "node-a.example.org", "NODE-A"])
def test_own_name_that_resolves_to_loopback_is_pointed_out(own_name):
    choice = choose(MACHINE, "127.0.0.1", host="node-a", peer="127.0.1.1", own_name=own_name)
    assert choice.name == "lo"
    assert "/etc/hosts" in choice.reason
    assert "127.0.1.1" in choice.reason


def test_localhost_is_this_machine():
    choice = choose(MACHINE, "127.0.0.1", host="localhost", peer="127.0.0.1", own_name="node-a")
    assert choice.name == "lo"
    assert "/etc/hosts" not in choice.reason
    assert "on this machine" in choice.reason


def test_any_loopback_source_belongs_to_the_loopback_interface():
    assert choose(MACHINE, "127.0.1.1", host="127.0.1.1", peer="127.0.1.1").name == "lo"


def test_own_address_as_peer_is_recognised():
    assert "own address" in choose(MACHINE, "10.0.0.2", host="10.0.0.2", peer="10.0.0.2").reason


def test_link_local_address_is_found_with_and_without_its_zone():
    for source in ("fe80::1", "fe80::1%eth0"):
        assert choose(MACHINE, source, host="peer", peer="fe80::9").name == "eth0"


def test_a_source_that_no_interface_has_is_an_error_that_names_host_and_source():
    with pytest.raises(ConfigError, match="node-b") as caught:
        choose(MACHINE, "10.9.9.9", host="node-b", peer="10.0.0.9")
    assert "10.9.9.9" in caught.value.message


@settings(deadline=None, max_examples=50)
@given(st.ip_addresses(v=4).filter(lambda address: not address.is_loopback))
def test_an_ipv4_mapped_ipv6_address_is_the_same_address(address):
    machine = [_interface("lo", "127.0.0.1"), _interface("eth7", str(address))]
    dressed = str(ipaddress.IPv6Address("::ffff:0:0") + int(address))
    assert choose(machine, dressed, host="peer", peer="::ffff:10.0.0.9").name == "eth7"


@pytest.mark.parametrize("name", ["docker0", "br-5f3a", "veth12ab", "virbr0", "cni0", "flannel.1", "cali9"])
def test_an_interface_of_container_software_is_virtual(name):
    assert is_virtual(name)


@pytest.mark.parametrize("name", ["eth0", "enp3s0", "wlan0", "bond0", "br0", "lo", "ib0"])
def test_an_ordinary_interface_is_not_virtual(name):
    assert not is_virtual(name)


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "127.0.1.1", "::1", "::ffff:127.0.0.1", "localhost", "[::1]"]
)
def test_loopback_is_recognised_in_every_spelling(address):
    assert is_loopback(address)


@pytest.mark.parametrize("address", ["10.0.0.1", "fd00::1", "node-a", "", "128.0.0.1", "0.0.0.0"])
def test_other_addresses_and_names_are_not_loopback(address):
    assert not is_loopback(address)


def test_this_machine_lists_its_loopback_address():
    entry = next(entry for entry in interfaces() if entry.address == "127.0.0.1")
    assert entry.loopback
    assert entry.up
    assert entry.family == "ipv4"


def test_loopback_peer_is_reached_by_the_interface_that_owns_loopback():
    own = owning("127.0.0.1")
    assert own is not None
    assert towards("127.0.0.1").name == own.name
    assert towards("localhost", port=29500).address in ("127.0.0.1", "::1")


def test_no_interface_owns_a_foreign_address():
    assert owning("203.0.113.77") is None


def test_machine_with_loopback_only_has_no_default_route(monkeypatch):
    monkeypatch.setattr(socket.socket, "connect", lambda self, target: None)
    monkeypatch.setattr(socket.socket, "getsockname", lambda self: ("127.0.0.1", 40000))
    assert default_route() is None


def test_default_route_is_none_where_no_route_leads_out(monkeypatch):
    def unreachable(self, target):
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(socket.socket, "connect", unreachable)
    assert default_route() is None


def test_every_own_address_leads_to_an_interface_that_has_it():
    for entry in interfaces():
        choice = owning(entry.address)
        assert choice is not None
        assert choice.name in {other.name for other in interfaces() if other.address == entry.address}


@pytest.mark.parametrize("host", ["a" * 300, "two..dots", "no\0body", ""])
def test_host_that_cannot_be_resolved_is_an_error_that_names_it(host):
    with pytest.raises(ConfigError) as caught:
        towards(host)
    assert repr(host) in caught.value.message
    assert caught.value.fix


def test_unknown_name_is_an_error_with_the_resolvers_reason(monkeypatch):
    def fail(*args, **kwargs):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(ConfigError, match="'nde-b' cannot be resolved: Name or service not known"):
        towards("nde-b")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]"])
def test_the_address_of_every_interface_is_not_a_peer(host):
    with pytest.raises(ConfigError, match="every interface"):
        towards(host)


def test_port_outside_the_range_is_an_error():
    with pytest.raises(ConfigError, match="70000"):
        towards("127.0.0.1", port=70000)


def test_peer_without_route_is_an_error_that_names_it(monkeypatch):
    def unreachable(self, target):
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(socket.socket, "connect", unreachable)
    with pytest.raises(ConfigError, match=r"no route to '198.51.100.1'.*Network is unreachable"):
        towards("198.51.100.1")


def test_the_second_address_of_a_host_is_used_if_the_first_has_no_route(monkeypatch):
    found = [
        (socket.AF_INET6, socket.SOCK_DGRAM, 17, "", ("2001:db8::9", 1, 0, 0)),
        (socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("127.0.0.1", 1)),
    ]
    real = socket.socket.connect

    def only_ipv4(self, target):
        if self.family == socket.AF_INET6:
            raise OSError(101, "Network is unreachable")
        real(self, target)

    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: found)
    monkeypatch.setattr(socket.socket, "connect", only_ipv4)
    assert towards("node-b").address == "127.0.0.1"


def test_the_error_for_a_link_local_peer_without_its_interface_shows_how_to_write_it():
    with pytest.raises(ConfigError) as caught:
        towards("fe80::1234")
    assert "fe80::1234%" in caught.value.fix
