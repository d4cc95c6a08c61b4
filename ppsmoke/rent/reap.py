"""What this account pays for and whose it is; ending what our own dead runs left, and nothing else.

Every `--vastai` start settles first; `reap` does only that; `ls` shows it. Accounts are shared: what is not provably a
dead run's is listed with the command that ends it, never touched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from ppsmoke.rent.destroy import end_instances, end_run
from ppsmoke.rent.labels import Label, has_prefix
from ppsmoke.rent.ledger import Entry, Journal, JournalView, owns, read_journals
from ppsmoke.rent.outcome import Leftover, Outcome, Target
from ppsmoke.rent.shapes import Instance, Listing
from ppsmoke.rent.vast_api import VastApi

SETTLE_S, SETTLE_LEAST_S = 120.0, 30.0  # for all of it, and for each journal and all expired labels at least
CONSOLE = "https://cloud.vast.ai/instances/"


class Whose(Enum):
    """Who answers for an instance."""

    LIVE_RUN = "a live run of this state folder"
    DEAD_RUN = "a dead run of this state folder"
    EXPIRED = "another run, whose time is over"
    OTHER_RUN = "another run, of another machine or state folder"
    PREFIXED = "no run of ours, though its label starts like one's"
    FOREIGN = "not ours"


@dataclass(frozen=True)
class Finding:
    """An instance of the account, or an open entry of a dead run's journal that shows no instance (yet)."""

    whose: Whose
    label: str | None
    instance: Instance | None = None
    entry: Entry | None = None
    owner: str = ""  # "run 4711" for a live run

    @property
    def to_be_ended(self) -> bool:
        return self.whose in (Whose.DEAD_RUN, Whose.EXPIRED)


def sort_out(listing: Listing, journals: Sequence[JournalView], *, now: float) -> list[Finding]:
    """Whose is what. `now` in seconds since 1970; where the service's own clock is behind it, that one counts, so that
    a wrong clock here ends nobody's run."""
    if listing.served_at is not None:
        now = min(now, listing.served_at)
    by_id = {
        entry.instance_id: journal
        for journal in journals
        for entry in journal.entries.values()
        if entry.open and entry.instance_id is not None
    }
    findings = [_whose(instance, by_id.get(instance.id), journals, now) for instance in listing.instances]
    shown = {finding.label for finding in findings} | {None}
    shown_ids = {instance.id for instance in listing.instances}
    for journal in journals:
        for entry in journal.entries.values():
            if (
                entry.open
                and not journal.owner_alive
                and entry.label not in shown
                and entry.instance_id not in shown_ids
            ):
                findings.append(Finding(Whose.DEAD_RUN, entry.label, None, entry))
    return findings


def _whose(instance: Instance, by_id: JournalView | None, journals: Sequence[JournalView], now: float) -> Finding:
    label = Label.parse(instance.label)
    # By its id first: somebody may have renamed it in the console, it is still the run's.
    owners = [journal for journal in journals if label is not None and owns(journal, label)]
    journal = by_id or (owners[0] if owners else None)
    if journal is not None:
        entry = journal.entries.get(instance.label or "")
        whose = Whose.LIVE_RUN if journal.owner_alive else Whose.DEAD_RUN
        return Finding(whose, instance.label, instance, entry, journal.owner)
    if label is None:
        whose = Whose.PREFIXED if has_prefix(instance.label) else Whose.FOREIGN
    else:
        whose = Whose.EXPIRED if label.expired(now) else Whose.OTHER_RUN
    return Finding(whose, instance.label, instance)


@dataclass(frozen=True)
class Settled:
    """What a settling did, found and could not do."""

    findings: tuple[Finding, ...]
    outcome: Outcome

    @property
    def untouched(self) -> list[Finding]:
        """What carries our prefix and was left alone, live runs apart."""
        return [finding for finding in self.findings if finding.whose in (Whose.OTHER_RUN, Whose.PREFIXED)]


async def settle(
    api: VastApi,
    folder: Path,
    *,
    dry_run: bool = False,
    choose_more: Callable[[Sequence[Finding]], Sequence[Finding]] | None = None,
    within_s: float = SETTLE_S,
    say: Callable[[str], None] = lambda text: None,
) -> Settled:
    """End what dead runs of this state folder left and what carries an expired label of ours.

    choose_more is `reap --all`: it is shown what else carries our prefix, and what it returns is ended too; live runs
    of this folder are never among it. dry_run: only look. Raises LedgerError or VastError when journals or account
    cannot be read: nothing is known then. `say` gets a line for each step."""
    account = await api.account()
    # The journals first: an instance that appears later than this cannot be mistaken for a dead run's.
    journals = read_journals(folder)
    listing = await api.instances()
    findings = sort_out(listing, journals, now=api.clock.wall())
    outcome = Outcome(warnings=tuple(f"{j.path}: {j.damaged} damaged lines" for j in journals if j.damaged))
    if dry_run:
        return Settled(tuple(findings), outcome)
    until = api.clock.now() + within_s
    for journal in journals:
        if not journal.owner_alive:
            outcome += await _settle_journal(api, journal.path, account, _left(api, until), say)
    chosen = [finding for finding in findings if finding.whose is Whose.EXPIRED]
    others = [finding for finding in findings if finding.whose in (Whose.OTHER_RUN, Whose.PREFIXED)]
    if choose_more is not None and others:
        chosen += [finding for finding in choose_more(others) if finding in others]
    targets = [Target(finding.instance.id, finding.label) for finding in chosen if finding.instance is not None]
    if targets:
        left_s = _left(api, until) if choose_more is None else within_s  # whoever was asked took time to answer
        outcome += await end_instances(api, targets, within_s=left_s, say=say)
    ended = {ended.instance_id for ended in outcome.ended if ended.instance_id is not None}
    left = [finding for finding in findings if finding.instance is None or finding.instance.id not in ended]
    return Settled(tuple(left), outcome)


def _left(api: VastApi, until: float) -> float:
    return max(SETTLE_LEAST_S, until - api.clock.now())


async def _settle_journal(
    api: VastApi, path: Path, account: str, within_s: float, say: Callable[[str], None]
) -> Outcome:
    journal = Journal.adopt(path, role="settle", at=api.clock.wall())
    if journal is None:
        return Outcome()  # somebody else settles it: its reaper, or another start
    try:
        return await end_run(api, journal, account=account, within_s=within_s, say=say)
    finally:
        journal.close()


def command_to_end(instance_id: int | None) -> str:
    """What a person can do about something left over."""
    if instance_id is None:
        return f"python -m ppsmoke reap (or look at {CONSOLE})"
    return f"python -m ppsmoke reap --all, vastai destroy instance {instance_id}, or {CONSOLE}"


def settled_lines(settled: Settled, *, dry_run: bool = False) -> list[str]:
    """What `reap` prints: destroyed, gone, not confirmed, and left alone."""
    lines = []
    if dry_run:
        lines += [
            f"would end {_name(finding)}: {finding.whose.value}" for finding in settled.findings if finding.to_be_ended
        ]
    lines += [f"{_id(ended.instance_id)} {ended.label or '(no label)'}: {ended.how}" for ended in settled.outcome.ended]
    for leftover in settled.outcome.leftovers:
        lines.append(leftover_line(leftover))
    for finding in settled.untouched:
        instance_id = finding.instance.id if finding.instance else None
        lines.append(f"left alone: {_name(finding)}, {finding.whose.value}; to end it: {command_to_end(instance_id)}")
    for finding in settled.findings:
        if finding.whose is Whose.LIVE_RUN:
            lines.append(f"in use: {_name(finding)}, by {finding.owner}; end that run to end it")
    lines += [f"warning: {warning}" for warning in settled.outcome.warnings]
    return lines or ["nothing of ours is rented on this account"]


def leftover_line(leftover: Leftover) -> str:
    """One line about something that may still cost money."""
    where = _id(leftover.instance_id)
    return f"NOT CONFIRMED: {where} {leftover.label}: {leftover.why}; to end it: {command_to_end(leftover.instance_id)}"


def ls_lines(findings: Sequence[Finding], *, now: float) -> list[str]:
    """What `ls` prints: a line for each instance that this folder's runs or another's rent, then what they come to;
    whatever is not ours is only counted."""
    lines = listed([finding for finding in findings if _is_shown(finding)], now=now)
    for what, whose in (
        ("of this state folder's runs", (Whose.LIVE_RUN, Whose.DEAD_RUN)),
        ("of other runs, on another machine or in another state folder", (Whose.EXPIRED, Whose.OTHER_RUN)),
        ("with a label that only starts like ours", (Whose.PREFIXED,)),
    ):
        group = [finding for finding in findings if finding.whose in whose]
        dph = sum(finding.instance.dph_total for finding in group if finding.instance is not None)
        if group:
            lines.append(f"{len(group)} {what}, ${dph:.3f} an hour")
    foreign = sum(finding.whose is Whose.FOREIGN for finding in findings)
    if not any(finding.whose in (Whose.LIVE_RUN, Whose.DEAD_RUN) for finding in findings):
        lines.append("nothing of this state folder's runs is rented on this account")
    if foreign:
        lines.append(f"{foreign} other instance{'s' if foreign > 1 else ''} on this account")
    return lines


def listed(findings: Sequence[Finding], *, now: float) -> list[str]:
    """A line for each, as `reap --all` asks about them."""
    return [_name(finding, now) + f", {_whose_line(finding, now)}" for finding in findings]


def _is_shown(finding: Finding) -> bool:
    return finding.whose is not Whose.FOREIGN


def _whose_line(finding: Finding, now: float) -> str:
    """Whose it is, and as far as a label tells, whether its run may still be alive."""
    label, text = Label.parse(finding.label), finding.whose.value
    if finding.whose is Whose.LIVE_RUN and finding.owner:
        ending = not finding.owner.startswith("run ")  # its reaper, or another start, has taken it over
        return f"{Whose.DEAD_RUN.value}, being ended by {finding.owner}" if ending else f"{text} ({finding.owner})"
    if finding.whose not in (Whose.EXPIRED, Whose.OTHER_RUN) or label is None:
        return text
    left_min = (label.expires_at - now) / 60
    if left_min > 0:
        return f"{text}, alive for at most {left_min:.0f} more min"
    return f"{text} ({-left_min:.0f} min ago)" if finding.whose is Whose.EXPIRED else f"{text}, its time is just over"


def to_json(findings: Sequence[Finding], *, now: float) -> list[dict[str, Any]]:
    """`ls --json`: a row for each instance of this folder's runs, of other runs, and with our prefix; foreign ones are
    nobody's business. expires_at: seconds since 1970, by its label."""
    return [
        {
            "id": finding.instance.id if finding.instance else (finding.entry.instance_id if finding.entry else None),
            "label": finding.label,
            "whose": finding.whose.name.lower(),
            "status": finding.instance.actual_status if finding.instance else None,
            "gpu": finding.instance.gpu_name if finding.instance else None,
            "usd_per_h": finding.instance.dph_total if finding.instance else None,
            "age_s": _age_s(finding.instance, now),
            "expires_at": label.expires_at if (label := Label.parse(finding.label)) else None,
        }
        for finding in findings
        if _is_shown(finding)
    ]


def _name(finding: Finding, now: float | None = None) -> str:
    instance = finding.instance
    if instance is None:
        return f"{finding.label} (no instance shows)"
    text = f"{_id(instance.id)} {finding.label or '(no label)'}: {instance.gpu_name or 'GPU'}"
    text += f", {instance.actual_status or 'provisioning'}, ${instance.dph_total:.3f} an hour"
    age_s = _age_s(instance, now)
    return (
        text if age_s is None else f"{text}, for {age_s / 60:.0f} min (about ${instance.dph_total * age_s / 3600:.2f})"
    )


def _age_s(instance: Instance | None, now: float | None) -> float | None:
    if now is None or instance is None or instance.started_at is None:
        return None
    return max(0.0, now - instance.started_at)


def _id(instance_id: int | None) -> str:
    return "instance ?" if instance_id is None else f"instance {instance_id}"
