"""comm/consent: all ranks go on together, or all raise.

Owns how a problem of one rank becomes an error on every rank. Refuses to know what the ranks are about to do.
"""

from __future__ import annotations

from typing import Any

from a2a.comm.protocol import Comm
from a2a.errors import A2AError, from_facts


def gather(comm: Comm, mine: Any, problem: A2AError | None) -> list[Any]:
    """Every rank's value, or every rank raises: its own problem if it has one, else the first problem of another."""
    answers = comm.allgather((mine, None if problem is None else problem.to_facts()))
    if problem is not None:
        raise problem
    for rank, (_, facts) in enumerate(answers):
        if facts is not None:
            raise from_facts(facts, reporter=rank)
    return [value for value, _ in answers]
