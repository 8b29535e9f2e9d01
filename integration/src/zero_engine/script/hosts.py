"""Hosts and slots of DeepSpeed's launcher: its host file, and ``--include`` and ``--exclude``.

worker-0 slots=4      a line of a host file: a host and its number of slots, one per rank
worker-0@worker-1:0,2 a filter: all slots of worker-0, and the slots 0 and 2 of worker-1
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from zero_core.errors import ConfigError

Hosts = Mapping[str, tuple[int, ...]]
"""Slots by host, in the order of ranks."""

_LINE = re.compile(r"(\S+)\s+slots=(\d+)")


def read_host_file(path: Path) -> Hosts:
    """Return the hosts of ``path`` with all of their slots."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the host file {path}: {error}") from None
    hosts: dict[str, tuple[int, ...]] = {}
    for number, line in enumerate(map(str.strip, lines), start=1):
        if not line or line.startswith("#"):
            continue
        found = _LINE.match(line)
        if found is None:
            raise ConfigError(
                f"{path}, line {number}: expected 'HOST slots=NUMBER', found {line!r}"
            )
        host, slots = found[1], int(found[2])
        if not slots:
            raise ConfigError(f"{path}, line {number}: {host} has no slot: leave the line out")
        if host in hosts:
            raise ConfigError(f"{path}, line {number}: {host} is there twice: keep one of them")
        hosts[host] = tuple(range(slots))
    if not hosts:
        raise ConfigError(f"{path} names no host: expected lines 'HOST slots=NUMBER'")
    return hosts


def parse_filter(text: str, option: str) -> dict[str, list[int]]:
    """Return the slots that ``text`` names by host. An empty list stands for all of a host's."""
    found: dict[str, list[int]] = {}
    for part in text.split("@"):
        host, colon, slots = part.partition(":")
        numbers = slots.split(",") if colon else []
        if not host or not all(number.strip().isdecimal() for number in numbers):
            raise ConfigError(
                f"{option} {text!r}: expected HOST[:SLOT,...][@HOST...], as in "
                f"'worker-0@worker-1:0,2', found {part!r}"
            )
        found.setdefault(host, []).extend(map(int, numbers))
    return found


def filtered(hosts: Hosts, *, include: str, exclude: str) -> Hosts:
    """Return what the filters leave of ``hosts``, in their order. Of the two one may be given."""
    if include and exclude:
        raise ConfigError("--include and --exclude exclude each other: give one of them")
    option = "--include" if include else "--exclude"
    named = parse_filter(include or exclude, option) if include or exclude else {}
    for host, asked in named.items():
        if host not in hosts:
            raise ConfigError(f"{option}: there is no host {host!r} among {', '.join(hosts)}")
        missing = sorted(set(asked) - {*hosts[host]})
        if missing:
            raise ConfigError(
                f"{option}: {host} has no slot {missing[0]}: it has {len(hosts[host])}, from 0 on"
            )
    if not named:
        return hosts
    left: dict[str, tuple[int, ...]] = {}
    for host, every in hosts.items():
        chosen = {*(named[host] or every)} if host in named else set()
        slots = tuple(slot for slot in every if (slot in chosen) == bool(include))
        if slots:
            left[host] = slots
    if not left:
        raise ConfigError(f"{option} {include or exclude!r} leaves no slot of {', '.join(hosts)}")
    return left
