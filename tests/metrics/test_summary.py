"""Means over cases and over clients, with values that are missing or infinite."""

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wardround.metrics.summary import Summary, WorstClient, across_clients, summarise

NAN, INF = math.nan, math.inf
finite = st.floats(-1e6, 1e6)
any_value = st.one_of(finite, st.just(NAN), st.just(INF))


def client(mean, num=1):
    return Summary(mean=mean, sd=0.0, num=num, num_skipped=0, num_infinite=0)


@given(st.lists(finite, min_size=2))
def test_mean_and_sd_equal_those_of_the_standard_library(values):
    summary = summarise(values)
    assert summary.mean == pytest.approx(statistics.fmean(values), rel=1e-9, abs=1e-6)
    assert summary.sd == pytest.approx(statistics.stdev(values), rel=1e-6, abs=1e-6)
    assert (summary.num, summary.num_skipped, summary.num_infinite) == (len(values), 0, 0)


@given(st.lists(any_value))
def test_every_value_is_used_or_skipped_or_infinite(values):
    summary = summarise(values)
    assert summary.num + summary.num_skipped + summary.num_infinite == len(values)
    assert math.isnan(summary.mean) == (summary.num == 0)
    assert not math.isinf(summary.mean)


def test_nan_is_skipped_and_infinite_values_are_counted():
    assert summarise([1.0, NAN, 3.0, INF]) == Summary(2.0, math.sqrt(2), 2, num_skipped=1, num_infinite=1)


def test_an_infinite_value_makes_the_mean_of_all_infinite():
    summary = summarise([1.0, NAN, 3.0, INF], surface_mean="all")
    assert (summary.mean, summary.num, summary.num_skipped, summary.num_infinite) == (INF, 3, 1, 1)
    assert math.isnan(summary.sd)


def test_the_mean_of_all_is_the_finite_mean_if_all_are_finite():
    assert summarise([1.0, NAN, 3.0], surface_mean="all") == summarise([1.0, NAN, 3.0])


@pytest.mark.parametrize("values", [[], [NAN], [INF], [NAN, INF]])
def test_without_a_finite_value_the_mean_is_nan(values):
    summary = summarise(values)
    assert math.isnan(summary.mean)
    assert math.isnan(summary.sd)
    assert summary.num == 0


def test_one_value_has_no_spread():
    assert summarise([0.7]) == Summary(0.7, 0.0, 1, 0, 0)


def test_clients_count_the_same_in_the_mean_and_by_cases_in_the_weighted_mean():
    clients = across_clients({"north": client(0.9, num=30), "south": client(0.6, num=10)}, best=1.0)
    assert clients.mean == pytest.approx(0.75)
    assert clients.weighted_mean == pytest.approx(0.825)
    assert clients.sd == pytest.approx(statistics.stdev([0.9, 0.6]))
    assert (clients.num_clients, clients.num_cases, clients.num_left_out) == (2, 40, 0)


@given(st.lists(st.lists(finite, min_size=1), min_size=1))
def test_the_weighted_mean_is_the_mean_over_all_cases(per_client):
    summaries = {str(index): summarise(values) for index, values in enumerate(per_client)}
    merged = summarise([value for values in per_client for value in values])
    assert across_clients(summaries, best=0.0).weighted_mean == pytest.approx(merged.mean, rel=1e-9, abs=1e-6)


@pytest.mark.parametrize(
    ("best", "worst"),
    [(1.0, ("south", 0.2)), (0.0, ("north", 0.9))],
    ids=["higher is better", "lower is better"],
)
def test_the_worst_client_is_farthest_from_the_best_value(best, worst):
    per_client = {"east": client(0.5), "north": client(0.9), "south": client(0.2)}
    assert across_clients(per_client, best=best).worst == worst


def test_the_worst_signed_difference_is_the_largest_either_way():
    per_client = {"east": client(1.0), "north": client(-5.0)}
    assert across_clients(per_client, best=0.0).worst == WorstClient("north", -5.0)


def test_a_client_without_a_valid_value_is_left_out_and_counted():
    clients = across_clients({"north": summarise([0.8, NAN]), "south": summarise([NAN, NAN])}, best=1.0)
    assert (clients.mean, clients.weighted_mean, clients.sd) == (0.8, 0.8, 0.0)
    assert clients.worst == ("north", 0.8)
    assert (clients.num_clients, clients.num_left_out, clients.num_cases) == (1, 1, 1)
    assert (clients.num_skipped, clients.num_infinite) == (3, 0)


def test_a_client_with_infinite_values_only_is_left_out_of_the_mean_yet_is_the_worst():
    clients = across_clients({"north": summarise([2.0, 4.0]), "south": summarise([INF, INF])}, best=0.0)
    assert (clients.mean, clients.num_clients, clients.num_left_out, clients.num_infinite) == (3.0, 1, 1, 2)
    assert clients.worst == ("south", INF)


def test_an_infinite_client_mean_makes_the_mean_over_clients_infinite():
    per_client = {"north": summarise([2.0]), "south": summarise([1.0, INF], surface_mean="all")}
    clients = across_clients(per_client, best=0.0)
    assert clients.mean == clients.weighted_mean == INF
    assert math.isnan(clients.sd)
    assert clients.worst == ("south", INF)


def test_a_single_client_is_its_own_mean_and_worst_with_no_spread():
    clients = across_clients({"north": client(0.7, num=4)}, best=1.0)
    assert (clients.mean, clients.weighted_mean, clients.sd) == (0.7, 0.7, 0.0)
    assert clients.worst == ("north", 0.7)


@pytest.mark.parametrize("per_client", [{}, {"north": summarise([])}])
def test_without_any_value_the_summary_is_nan_and_names_no_worst(per_client):
    clients = across_clients(per_client, best=1.0)
    assert math.isnan(clients.mean)
    assert math.isnan(clients.weighted_mean)
    assert math.isnan(clients.sd)
    assert clients.worst is None
    assert (clients.num_clients, clients.num_cases, clients.num_left_out) == (0, 0, len(per_client))
