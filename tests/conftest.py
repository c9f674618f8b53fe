"""Runs tests on ranks under plain pytest, mpirun and torchrun alike: see tests/ranks.py."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Generator
from typing import Any, NoReturn

import hypothesis
import pytest
from ranks import Ranks

from a2a.comm import launcher

_RANKS = pytest.StashKey[Ranks]()
_LAST_WORDS_S = 2.0
"""How long a rank that failed waits before it ends the job: its launcher drops what it has not passed on by then."""


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_RANKS] = Ranks()
    if config.stash[_RANKS].in_job:
        # Examples drawn at random, or taken from a file that only some ranks have, would differ between ranks.
        hypothesis.settings.register_profile("job", derandomize=True, database=None)
        hypothesis.settings.load_profile("job")


@pytest.fixture
def run_ranks(request: pytest.FixtureRequest) -> Ranks:
    """Runs a function on ranks; see tests/ranks.py."""
    return request.config.stash[_RANKS]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    on_ranks = [item for item in items if "run_ranks" in getattr(item, "fixturenames", ())]
    for item in on_ranks:
        item.add_marker(pytest.mark.ranks)
    if config.stash[_RANKS].in_job and len(on_ranks) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in on_ranks])
        items[:] = on_ranks


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    if report.failed and item.config.stash[_RANKS].in_job:
        _end_job(item.config, f"{item.nodeid} ({report.when})", report.longreprtext)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    report = yield
    if report.failed and collector.config.stash[_RANKS].in_job:
        _end_job(collector.config, f"{collector.nodeid} (collect)", report.longreprtext)
    return report


def _end_job(config: pytest.Config, what: str, text: str) -> NoReturn:
    """Other ranks wait for this one in the body it left: no rank may go on."""
    started_by = config.stash[_RANKS].launcher
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is not None:
        capture.suspend_global_capture(in_=True)
    print(f"\nrank {started_by.rank}: {what} failed; this ends the job\n{text}", file=sys.stderr, flush=True)
    if started_by.kind in launcher.MPI_KINDS:
        from a2a.comm import mpi

        time.sleep(_LAST_WORDS_S)
        mpi.abort(1)
    os._exit(1)
