"""The budget file: charged before anything leaves, never reset."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from pytest import approx, fixture, mark, raises

from wardround.privacy import Policy, PrivacyBudget, PrivacyRefusal, PrivacySettings
from wardround.privacy.budget import Line
from wardround.privacy.noise import draw_gaussian

CLIENT = PrivacySettings(level="client", epsilon=4.0)
CASE = PrivacySettings(level="case", epsilon=4.0)


@fixture
def budget(tmp_path: Path) -> PrivacyBudget:
    return PrivacyBudget(tmp_path / "state" / "privacy.jsonl")


def spend(budget: PrivacyBudget, policy: Policy, run: str = "a", rounds: int = 2) -> None:
    for round in range(rounds):
        budget.charge(policy, run, round, rounds_left=rounds - round)


def test_a_spent_budget_is_refused_in_one_sentence(budget: PrivacyBudget) -> None:
    spend(budget, Policy(CLIENT))

    with raises(PrivacyRefusal, match="budget of this run is spent: epsilon 4 at delta 1e-05"):
        budget.charge(Policy(CLIENT), "a", 1, rounds_left=1)
    assert len(budget.read()) == 2
    assert budget.spent(CLIENT) == approx(4.0, rel=1e-5)


def test_a_new_process_reads_what_was_spent(budget: PrivacyBudget) -> None:
    spend(budget, Policy(CLIENT))

    with raises(PrivacyRefusal, match="is spent"):
        PrivacyBudget(budget.path).charge(Policy(CLIENT), "a", 0, rounds_left=2)


def test_runs_of_a_hospital_share_its_budget(budget: PrivacyBudget) -> None:
    small = Policy(PrivacySettings(level="client", epsilon=2.0), CLIENT)
    spend(budget, small, "first")
    spend(budget, small, "second")
    assert budget.spent(CLIENT) < 4.0

    with raises(PrivacyRefusal, match="this hospital is spent"):
        for number in range(9):
            spend(budget, small, f"run {number}")
    assert budget.spent(CLIENT) <= 4.0


def test_without_a_hospitals_own_budget_runs_count_by_themselves(budget: PrivacyBudget) -> None:
    spend(budget, Policy(CLIENT), "first")
    spend(budget, Policy(CLIENT), "second")

    assert budget.spent(CLIENT, "first") == approx(budget.spent(CLIENT, "second"))


def test_an_epsilon_that_no_noise_keeps_is_not_called_spent(budget: PrivacyBudget) -> None:
    with raises(PrivacyRefusal, match="epsilon 0.0001 at delta 1e-05 .* of this run is so small"):
        budget.charge(Policy(CLIENT.model_copy(update={"epsilon": 1e-4})), "a", 0, rounds_left=1)
    assert not budget.read()


def test_case_level_answers_cannot_be_counted_at_client_level(budget: PrivacyBudget) -> None:
    budget.charge(Policy(CASE, CASE), "a", 0, rounds_left=1, rate=0.5, steps=2)

    with raises(PrivacyRefusal, match="does not add up"):
        budget.charge(Policy(CLIENT, CLIENT), "b", 0, rounds_left=1)


def test_a_line_that_a_crash_cut_off_is_replaced(budget: PrivacyBudget) -> None:
    spend(budget, Policy(CLIENT), rounds=3)
    whole = budget.path.read_bytes()
    budget.path.write_bytes(whole[:-5])
    assert len(budget.read()) == 2

    budget.charge(Policy(CLIENT), "a", 2, rounds_left=1)
    assert [line.round for line in budget.read()] == [1, 2, 3]


@mark.parametrize("change", [b"{}\n", b"nonsense\n", b'{"noise": -1}\n', b"\xff\n"])
def test_nothing_leaves_on_a_damaged_file(budget: PrivacyBudget, change: bytes) -> None:
    spend(budget, Policy(CLIENT), rounds=1)
    budget.path.write_bytes(change + budget.path.read_bytes())

    with raises(PrivacyRefusal, match="damaged"):
        budget.charge(Policy(CLIENT), "b", 0, rounds_left=1)


def test_a_charge_outlives_a_killed_process_and_its_noise_never_comes_again(budget: PrivacyBudget) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path\n"
        "import torch\n"
        "from wardround.privacy import PrivacyBudget, Policy, PrivacySettings\n"
        "from wardround.privacy.noise import draw_gaussian\n"
        "policy = Policy(PrivacySettings(level='client', epsilon=4.0))\n"
        "PrivacyBudget(Path(sys.argv[1])).charge(policy, 'a', 0, rounds_left=1)\n"
        "torch.manual_seed(1)\n"
        "Path(sys.argv[2]).write_bytes(draw_gaussian(torch.zeros(10_000)).numpy().tobytes())\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    drawn = budget.path.with_name("drawn")
    ended = subprocess.run([sys.executable, "-c", script, str(budget.path), str(drawn)])

    assert ended.returncode == -9
    assert isinstance(budget.read()[0], Line)
    with raises(PrivacyRefusal, match="is spent"):
        budget.charge(Policy(CLIENT), "a", 0, rounds_left=1)
    torch.manual_seed(1)
    again = draw_gaussian(torch.zeros(10_000)).numpy()
    assert abs(np.corrcoef(np.frombuffer(drawn.read_bytes()), again)[0, 1]) < 0.05
