"""The chain's names: who is who in the cluster, computed from STAGE and NUM_STAGES alone (spec, section 3)."""

from __future__ import annotations

STAGE_MAILBOX = "stage"
ORCHESTRATOR_MAILBOX = "orchestrator"
ORCHESTRATOR_ROLE = "orchestrator"
ENTRY_NAME = "pp-entry"
EXIT_NAME = "pp-exit"


def stage_name(stage: int) -> str:
    """The name that stage i registers: pp-stage-i."""
    return f"pp-stage-{stage}"


def stage_role(stage: int, num_stages: int) -> str:
    """The role in stage i's certificate."""
    return f"stage-{stage}-of-{num_stages}"


def names_of(stage: int, num_stages: int) -> list[str]:
    """Every name that a stage registers; it answers to each in its mailbox STAGE_MAILBOX."""
    names = [stage_name(stage)]
    if stage == 0:
        names.append(ENTRY_NAME)
    if stage == num_stages - 1:
        names.append(EXIT_NAME)
    return names


def may_own(name: str, role: str, num_stages: int) -> bool:
    """Whether the holder of this role may own this name: what a name counts for, whoever claims it."""
    return any(
        role == stage_role(stage, num_stages) and name in names_of(stage, num_stages) for stage in range(num_stages)
    )
