"""Aggregation weights where clients annotate different classes, or nothing."""

from pytest import approx

from wardround.aggregation.weights import by_class
from wardround.messages import Reply

LIVER, KIDNEY, BOTH, NONE = (True, False), (False, True), (), (False, False)


def weigh(*clients: tuple[tuple[bool, ...], float]) -> list[float]:
    return by_class([weight for _, weight in clients], [Reply(annotates=told) for told, _ in clients])


def test_a_client_without_labels_has_no_vote_and_keeps_its_weight() -> None:
    assert weigh((LIVER, 0.1), (KIDNEY, 0.5), (NONE, 0.4)) == approx([0.3, 0.3, 0.4])
    assert weigh((LIVER, 0.2), (BOTH, 0.2), (NONE, 0.6)) == approx([0.1, 0.3, 0.6])


def test_weights_stay_where_all_that_have_labels_annotate_everything() -> None:
    assert weigh((BOTH, 0.3), (BOTH, 0.3), (NONE, 0.4)) == [0.3, 0.3, 0.4]
    assert weigh((NONE, 1.0)) == [1.0]


def test_a_class_whose_clients_have_no_weight_has_no_vote() -> None:
    assert weigh((LIVER, 0.0), (KIDNEY, 0.5), (NONE, 0.5)) == approx([0.0, 0.5, 0.5])
    assert weigh((LIVER, 0.0), (KIDNEY, 0.0), (NONE, 1.0)) == approx([0.0, 0.0, 1.0])
