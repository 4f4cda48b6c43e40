"""FedEvi: golden vectors, the evidential objective, weights, exchanges, whole runs."""

import itertools
import math
from pathlib import Path

import pytest
import torch
from helpers import Watcher, run, settings, spoil, vectors
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import wardround as wr
from wardround.aggregation.weights import add_newcomers
from wardround.clients import Answer, Clients, Registration
from wardround.config_file import resolve
from wardround.data.cases import Batch, ClientData, TensorSplit
from wardround.engine.memory_store import MemoryStore
from wardround.errors import ClientError, ConfigError
from wardround.losses.objective import Context, DiceBCE
from wardround.messages import Message, Reply, ServerState
from wardround.methods import build_method, build_objective
from wardround.methods.fedevi import Evidential, FedEvi
from wardround.params import Params

GOLDEN = vectors("fedevi")
LITERAL = {"cap": 80, "cap_kind": "hard"}  # α = exp(z) + 1 without a cap, as the golden numbers have it
AS_RELEASED = Path(__file__).parents[2] / "configs" / "methods" / "fedevi-as-released.yaml"
UNEVEN = {"phantom": {"hospitals": 3, "size": 16, "cases": [2, 8, 11]}}  # north trains on 1, validates on 0
POLYP = {"a": 700, "b": 138, "c": 267, "d": 429}


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def context(round=0):
    return Context(round=round, rounds=20, num_examples=4, memory={}, generator=torch.Generator())


def golden_pixels(case):
    """Logits (1, C, pixels) and labels (1, pixels)."""
    inputs = GOLDEN[case]["inputs"]
    return tensor(inputs["logits"]).T[None], torch.tensor(inputs["labels"])[None]


def example(num_classes=2, batch=2, size=(4, 4), seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(batch, num_classes, *size, generator=generator, dtype=dtype)
    return logits, torch.randint(0, num_classes, (batch, *size), generator=generator)


# The objective


def test_the_loss_of_a_case_is_the_golden_one():
    logits, label = golden_pixels("total_loss")
    expected = GOLDEN["total_loss"]["expected"]
    bayes = Evidential(smooth=0, **LITERAL)
    assert bayes.sample_losses(logits, label).item() == pytest.approx(
        expected["loss_with_variance"], abs=1e-11
    )
    plug_in = Evidential(dice_mode="plug_in", **LITERAL)
    expected = expected["loss_plug_in_smooth_1e_5"]
    assert plug_in.sample_losses(logits, label).item() == pytest.approx(expected, abs=1e-11)


def test_the_training_loss_is_the_golden_one_when_annealing_is_over():
    logits, label = golden_pixels("total_loss")
    loss = Evidential(smooth=0, **LITERAL).loss(torch.nn.Identity(), Batch(logits, label), context(round=9))
    assert loss.item() == pytest.approx(GOLDEN["total_loss"]["expected"]["loss_with_variance"], abs=1e-11)


def test_the_kl_rises_over_ten_rounds_counted_from_one():
    objective = Evidential()
    factors = [objective.annealing(round) for round in range(12)]
    assert factors == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.0, 1.0])
    assert Evidential(anneal_rounds=0).annealing(0) == 1.0


def test_the_records_show_dice_and_kl():
    logits, label = example()
    here = context(round=4)
    loss = Evidential(lam=0.2).loss(torch.nn.Identity(), Batch(logits, label), here)
    assert loss.item() == pytest.approx((here.terms["dice"] + 0.2 * 0.5 * here.terms["kl"]).item())


def test_with_lam_zero_only_the_dice_is_left():
    logits, label = example()
    here = context()
    loss = Evidential(lam=0).loss(torch.nn.Identity(), Batch(logits, label), here)
    assert list(here.terms) == ["dice"]
    assert loss == here.terms["dice"]


@pytest.mark.parametrize("num_classes", [2, 3])
def test_every_class_has_an_output_and_the_argmax_is_the_prediction(num_classes):
    objective = Evidential()
    assert objective.num_outputs(num_classes) == num_classes
    logits, _ = example(num_classes)
    p = objective.probabilities(logits)
    assert torch.allclose(p.sum(dim=1), torch.ones(2, 4, 4, dtype=torch.float64))
    alpha = objective.alpha(logits)
    assert torch.equal(p, alpha / alpha.sum(dim=1, keepdim=True))
    assert torch.equal(objective.predict(logits), p.argmax(dim=1).to(torch.uint8))


def test_a_case_loss_is_the_training_loss_of_a_batch_of_one():
    logits, label = example(num_classes=3)
    objective = Evidential()
    each = objective.sample_losses(logits, label)
    alone = [
        objective.loss(torch.nn.Identity(), Batch(logits[i : i + 1], label[i : i + 1]), context(9)).item()
        for i in range(2)
    ]
    assert each.tolist() == pytest.approx(alone, abs=1e-12)


@pytest.mark.parametrize("num_classes", [2, 3])
@pytest.mark.parametrize("chosen", [{}, {"evidence": "softplus"}, {"dice_mode": "plug_in", **LITERAL}])
def test_the_gradient_is_right(num_classes, chosen):
    logits, label = example(num_classes, size=(2, 3))
    objective = Evidential(lam=0.5, **chosen)

    def loss(values):
        return objective.loss(torch.nn.Identity(), Batch(values, label), context(3))

    assert torch.autograd.gradcheck(loss, logits.requires_grad_())


EXTREMES = {
    "very sure": lambda shape: 100 * torch.sign(torch.arange(math.prod(shape)).reshape(shape) % 3 - 0.5),
    "all up": lambda shape: torch.full(shape, 100.0),
    "all down": lambda shape: torch.full(shape, -100.0),
    "constant": lambda shape: torch.zeros(shape),
}


@pytest.mark.parametrize("name", EXTREMES)
@pytest.mark.parametrize("num_classes", [2, 3])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(
    "chosen", [{}, {"evidence": "softplus"}, {"dice_mode": "plug_in", "smooth": 0.0, **LITERAL}]
)
def test_nothing_becomes_nan_or_infinite(name, num_classes, half, chosen):
    objective = Evidential(lam=1.0, anneal_rounds=0, **chosen)
    logits = EXTREMES[name]((1, num_classes, 6, 6)).requires_grad_()
    for label in (torch.zeros(1, 6, 6).long(), torch.ones(1, 6, 6).long()):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            given = logits.bfloat16() if half else logits
            loss = objective.loss(torch.nn.Identity(), Batch(given, label), context())
        (gradient,) = torch.autograd.grad(loss, logits)
        assert loss.dtype == torch.float32
        assert torch.isfinite(loss)
        assert torch.isfinite(gradient).all()
        assert torch.isfinite(objective.probabilities(logits)).all()


# Scores


class Scored:
    """A client that has logits for each model: its `evaluate` is the engine's, on given logits."""

    name = "north"
    data = ClientData(TensorSplit.of([]), TensorSplit.of([]), TensorSplit.of([]))

    def __init__(self, surrogate, own, objective):
        self.logits = {"surrogate": surrogate, "own": own}
        self.objective = objective
        self.memory = {"trained": "own"}

    def evaluate(self, params, function, *, fallback):
        logits = self.logits[params]
        return float(function(logits, Batch(logits, logits)).mean()) if len(logits) else None


def scored(method, surrogate, own):
    client = Scored(surrogate, own, Evidential(**LITERAL))
    scores = method.score(client, Message(params="surrogate")).scalars
    assert client.memory == {}  # the model is dropped once it is scored
    return scores


def test_gap_and_reliability_are_the_golden_ones():
    case = GOLDEN["gap_and_reliability"]
    surrogate = tensor(case["inputs"]["surrogate_logits"]).movedim(-1, 1)  # (image, class, pixel)
    own = tensor(case["inputs"]["local_logits"]).movedim(-1, 1)
    for reliability in ("image", "ratio"):
        method = FedEvi(reliability=reliability)
        scores = scored(method, surrogate, own)
        assert scores["G"] == pytest.approx(case["expected"]["G"], abs=1e-11)
        assert scores["R"] == pytest.approx(case["expected"][f"R_{reliability}"], abs=1e-10)
        g = method.increments([Reply(scalars=scores, client="north")])["north"]
        assert g == pytest.approx(case["expected"][f"g_{reliability}"], abs=1e-10)


def test_reliability_is_finite_for_a_model_without_any_doubt():
    sure = tensor([[[80.0], [-80.0]]])
    assert math.isfinite(scored(FedEvi(), sure, sure)["R"])


def test_a_client_without_cases_sends_no_scores():
    nothing = torch.zeros(0, 2, 4)
    for reliability in ("image", "ratio"):
        assert scored(FedEvi(reliability=reliability), nothing, nothing) == {}


def test_a_client_that_never_trained_cannot_be_scored():
    client = Scored(tensor([[[0.0], [0.0]]]), None, Evidential())
    client.memory = {}
    with pytest.raises(ClientError, match="before it trained"):
        FedEvi().score(client, Message(params="surrogate"))


@pytest.mark.parametrize("wrong", [-0.1, "much", None, 1e300, math.nan, [1.0]])
def test_a_score_no_honest_client_sends_counts_as_missing(wrong):
    replies = [
        Reply(scalars={"G": 0.1, "R": wrong}, client="east"),
        Reply(scalars={"G": 0.1, "R": 2.0}, client="north"),
    ]
    assert FedEvi().increments(replies) == {"north": 0.2}


def test_the_ablations_take_one_factor_each():
    reply = Reply(scalars={"G": 0.05, "R": 3.0}, client="north")
    assert FedEvi().increments([reply])["north"] == pytest.approx(0.15)
    assert FedEvi(use_reliability=False).increments([reply]) == {"north": 0.05}
    assert FedEvi(use_gap=False).increments([reply]) == {"north": 3.0}
    assert not FedEvi(use_gap=False, use_reliability=False).moves


# Weights


def by_name(values, names="abcd"):
    return dict(zip(names, values, strict=False))


def test_the_weights_of_two_rounds_are_the_golden_ones():
    inputs, expected = GOLDEN["weight_update"]["inputs"], GOLDEN["weight_update"]["expected"]
    method = FedEvi(delta=inputs["delta"], floor=0)
    beta = method.first_weights(server({}, sizes=by_name(inputs["n_train"])))
    g = by_name(inputs["g"])
    for field in ("beta0", "beta1", "beta2"):
        assert list(beta.values()) == pytest.approx(expected[field], abs=1e-11)
        beta = method.update(beta, g)


def test_constant_increments_lead_to_their_shares_at_the_golden_rate():
    inputs, expected = GOLDEN["weight_update"]["inputs"], GOLDEN["weight_update"]["expected"]
    method, g = FedEvi(floor=0), by_name(inputs["g"])
    beta, end = by_name(expected["beta0"]), expected["fixed_point"]
    nearer = method.update(beta, g)
    rate = (nearer["a"] - end[0]) / (beta["a"] - end[0])
    assert rate == pytest.approx(expected["retention"], abs=1e-10)
    for _ in range(200):
        beta = method.update(beta, g)
    assert list(beta.values()) == pytest.approx(end, abs=1e-11)
    assert end == pytest.approx([value / sum(inputs["g"]) for value in inputs["g"]], abs=1e-11)


def test_the_floor_is_the_golden_one_renormalised_or_as_released():
    inputs, expected = GOLDEN["weight_floor"]["inputs"], GOLDEN["weight_floor"]["expected"]
    beta, g = by_name(inputs["beta_prev"]), by_name(inputs["g"])
    ours = FedEvi(floor=inputs["floor"]).update(beta, g)
    assert list(ours.values()) == pytest.approx(expected["beta_renormalised"], abs=1e-12)
    theirs = FedEvi(floor=inputs["floor"], floor_renormalise=False).update(beta, g)
    assert list(theirs.values()) == pytest.approx(expected["beta_public_code"], abs=1e-12)


def test_a_client_without_scores_keeps_its_weight_as_in_the_golden_case():
    case = GOLDEN["weight_update_client_without_validation"]
    beta = by_name(case["inputs"]["beta_prev"])
    g = {name: value for name, value in by_name(case["inputs"]["g"]).items() if value is not None}
    after = FedEvi().update(beta, g)
    assert after["b"] == beta["b"]
    assert list(after.values()) == pytest.approx(case["expected"]["beta"], abs=1e-11)


@hypothesis_settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(1, 1000), min_size=1, max_size=6),
    st.lists(st.none() | st.floats(0, 1e6), min_size=6, max_size=6),
    st.sampled_from([0.0, 1e-3, 0.05]),
)
def test_weights_are_never_negative_and_sum_to_one_and_names_do_not_matter(sizes, increments, floor):
    names = "abcdef"[: len(sizes)]
    beta = {name: size / sum(sizes) for name, size in zip(names, sizes, strict=True)}
    g = {name: x for name, x in zip(names, increments, strict=False) if x is not None}
    method = FedEvi(floor=floor)
    after = method.update(beta, g)
    assert min(after.values()) >= 0
    assert math.fsum(after.values()) == pytest.approx(1, abs=1e-12)
    assert all(after[name] == beta[name] for name in beta if name not in g)
    turned = method.update(dict(reversed(beta.items())), dict(reversed(g.items())))
    assert turned == after


def test_a_newcomer_enters_by_its_size_and_the_others_make_room():
    beta = add_newcomers({"a": 0.7, "b": 0.3}, {"a": 0.4, "b": 0.4, "c": 0.2})
    assert beta == pytest.approx({"a": 0.56, "b": 0.24, "c": 0.2})
    assert add_newcomers({}, {"a": 0.4, "b": 0.6}) == {"a": 0.4, "b": 0.6}
    assert add_newcomers(beta, {"a": 0.5, "b": 0.5}) == beta  # who left keeps its weight for its return


# Exchanges


class Fake:
    """A transport whose clients return given models and scores; None is a client that is lost."""

    def __init__(self, models, scores, sizes):
        self.models, self.scores, self.sizes = models, scores, sizes
        self.sent = []

    def deliver(self, task, round, messages, sync_state):
        for name, message in messages.items():
            self.sent.append((task, name, message.params))
            if task == "train":
                reply = Message(params=self.models[name])
                yield Answer(name, reply, num_examples=self.sizes[name], num_steps=1)
            elif self.scores.get(name) is None:
                yield Answer(name, failure="gone")
            else:
                yield Answer(name, Message(scalars=self.scores[name]), num_examples=self.sizes[name])


def server(models, scores=None, sizes=None, present=None):
    sizes = sizes or dict.fromkeys(models, 10)
    spec = {"w": ((5,), torch.float64)}
    registered = [Registration(name, size, tensors=spec) for name, size in sizes.items()]
    clients = Clients(Fake(models, scores or {}, sizes), registered, rounds=10, min_clients=1)
    clients.begin_round(0, present or list(sizes))
    return clients


def golden_models():
    rows = GOLDEN["surrogate_and_global"]["inputs"]["client_params"]
    return by_name([Params({"w": tensor(row)}) for row in rows])


def golden_scores():
    return by_name([{"G": value, "R": 1.0} for value in GOLDEN["weight_update"]["inputs"]["g"]])


def start(memory=None):
    return ServerState(Params({"w": torch.zeros(5, dtype=torch.float64)}), memory or {})


def test_surrogate_and_global_model_are_the_golden_ones():
    expected = GOLDEN["surrogate_and_global"]["expected"]
    clients = server(golden_models(), golden_scores(), POLYP)
    state = FedEvi().run_round(start(), clients)
    surrogates = [params for task, _, params in clients._transport.sent if task == "score"]
    assert len(surrogates) == 4
    assert surrogates[0]["w"].tolist() == pytest.approx(expected["surrogate"], abs=1e-10)
    assert state.params["w"].tolist() == pytest.approx(expected["global_model"], abs=1e-10)
    beta = GOLDEN["surrogate_and_global"]["inputs"]["beta_new"]
    assert list(state.memory["weights"].values()) == pytest.approx(beta, abs=1e-11)
    assert list(state.notes["weights"].values()) == pytest.approx(beta, abs=1e-11)
    assert state.notes["sum_g"] == pytest.approx(0.52)
    assert "warnings" not in state.notes


def test_the_second_round_starts_from_the_weights_of_the_first():
    clients = server(golden_models(), golden_scores(), POLYP)
    state = FedEvi().run_round(start(), clients)
    clients.begin_round(1, list("abcd"))
    state = FedEvi().run_round(state, clients)
    expected = GOLDEN["weight_update"]["expected"]["beta2"]
    assert list(state.memory["weights"].values()) == pytest.approx(expected, abs=1e-11)


def test_a_client_lost_between_the_exchanges_keeps_its_weight_and_its_model_counts():
    scores = golden_scores() | {"b": None}
    state = FedEvi().run_round(start(), server(golden_models(), scores, POLYP))
    expected = GOLDEN["weight_update_client_without_validation"]["expected"]["beta"]
    assert list(state.memory["weights"].values()) == pytest.approx(expected, abs=1e-10)
    assert state.notes["weights"]["b"] == pytest.approx(138 / 1534)
    assert state.notes["held"] == ["b"]


def test_exclude_leaves_a_client_without_scores_out_of_the_mean_only():
    scores = golden_scores() | {"b": {}}
    state = FedEvi(missing_scores="exclude").run_round(start(), server(golden_models(), scores, POLYP))
    assert list(state.notes["weights"]) == ["a", "c", "d"]
    assert math.fsum(state.notes["weights"].values()) == pytest.approx(1, abs=1e-12)
    assert state.memory["weights"]["b"] == pytest.approx(138 / 1534)


@pytest.mark.parametrize("missing", ["hold", "exclude"])
def test_a_round_in_which_nobody_has_scores_changes_no_weight_and_warns(missing):
    state = FedEvi(missing_scores=missing).run_round(start(), server(golden_models(), {}, POLYP))
    assert list(state.memory["weights"].values()) == pytest.approx([n / 1534 for n in POLYP.values()])
    assert len(state.notes["weights"]) == 4
    assert "no client has scores" in state.notes["warnings"][0]


def test_absent_clients_keep_their_weight_and_the_present_share_the_mean():
    clients = server(golden_models(), golden_scores(), POLYP, present=["a", "c"])
    state = FedEvi().run_round(start(), clients)
    beta = state.memory["weights"]
    assert (beta["b"], beta["d"]) == (138 / 1534, 429 / 1534)
    assert math.fsum(beta.values()) == pytest.approx(1, abs=1e-12)
    shares = state.notes["weights"]
    assert list(shares) == ["a", "c"]
    assert shares["a"] == pytest.approx(beta["a"] / (beta["a"] + beta["c"]))


@pytest.mark.parametrize(("size", "says"), [(1e-4, "hardly move"), (1.0, None), (50.0, "forget")])
def test_unusual_sums_of_increments_are_warned_of(size, says, caplog):
    scores = {name: {"G": size / 4, "R": 1.0} for name in "abcd"}
    with caplog.at_level("INFO"):
        state = FedEvi().run_round(start(), server(golden_models(), scores, POLYP))
    assert f"sum of g is {size:.4g}," in caplog.text
    warnings = state.notes.get("warnings", [])
    assert bool(warnings) == (says is not None)
    if says:
        assert says in warnings[0]
        assert says in caplog.text


def test_the_order_of_clients_does_not_matter():
    results = []
    for order in itertools.islice(itertools.permutations("abcd"), 0, None, 7):
        models = {name: golden_models()[name] for name in order}
        sizes = {name: POLYP[name] for name in order}
        results.append(FedEvi().run_round(start(), server(models, golden_scores(), sizes)))
    assert len({state.params.sha256() for state in results}) == 1


def test_identical_replies_leave_the_model_as_it_is():
    same = golden_models()["a"]
    state = FedEvi().run_round(start(), server(dict.fromkeys("abcd", same), golden_scores(), POLYP))
    assert torch.allclose(state.params["w"], same["w"], rtol=0, atol=1e-15)


def test_one_client_alone_is_local_training():
    models = {"a": golden_models()["a"]}
    state = FedEvi().run_round(start(), server(models, {"a": {"G": 0.1, "R": 2.0}}))
    assert torch.equal(state.params["w"], models["a"]["w"])
    assert state.memory["weights"] == {"a": 1.0}


def test_uniform_start_gives_everybody_the_same():
    assert FedEvi(init="uniform").first_weights(server({}, sizes=POLYP)) == dict.fromkeys("abcd", 0.25)


def test_as_released_the_weights_are_used_as_they_are():
    memory = {"weights": {"a": 0.0005, "b": 0.9995}}
    models = {name: golden_models()[name] for name in "ab"}
    scores = {name: {"G": 0.0, "R": 1.0} for name in "ab"}
    method = FedEvi(floor_renormalise=False)
    state = method.run_round(start(memory), server(models, scores))
    assert state.notes["weights"] == pytest.approx({"a": 0.001, "b": 0.9995}, abs=1e-15)
    expected = 0.001 * models["a"]["w"] + 0.9995 * models["b"]["w"]
    assert torch.allclose(state.params["w"], expected, rtol=0, atol=1e-15)


# Whole runs


def test_a_run_records_scores_and_drops_scored_models(tmp_path):
    result = run(tmp_path / "run", method={"name": "fedevi"})
    for record in result.records:
        assert record["lost"] == record["refused"] == {}
        assert set(record["G"]) == set(record["R"]) == set(record["weights"]) == {"east", "north", "south"}
        assert math.fsum(record["weights"].values()) == pytest.approx(1, abs=1e-12)
        assert record["g"]["east"] == pytest.approx(record["G"]["east"] * record["R"]["east"])
        assert set(record["loss"]["north"]) == {"total", "dice", "kl"}
        assert [exchange["task"] for exchange in record["exchanges"]] == ["train", "score"]
    memory = MemoryStore(tmp_path / "run" / "clients" / "north").load()
    assert "trained" not in memory


def test_with_delta_zero_it_is_fedavg_bit_for_bit(tmp_path):
    sizes = {"phantom": {"hospitals": 3, "size": 16, "cases": [8, 5, 11]}}
    objective = {"name": "evidential", "lam": 0}
    plain = run(tmp_path / "fedavg", data=sizes, method={"name": "fedavg"}, objective=objective)
    for number, off in enumerate([{"delta": 0}, {"use_gap": False, "use_reliability": False}]):
        method = {"name": "fedevi", **off}
        still = run(tmp_path / f"off-{number}", data=sizes, method=method, objective=objective)
        assert still.params_sha256 == plain.params_sha256


def test_the_evidential_objective_also_runs_under_fedavg_and_with_three_classes(tmp_path):
    data = {"phantom": {"hospitals": 2, "size": 16, "cases": 6, "num_classes": 3}}
    result = run(tmp_path, rounds=1, data=data, method={"name": "fedavg"}, objective={"name": "evidential"})
    assert result.status == "done"


def test_it_runs_on_volumes(tmp_path):
    data = {"phantom": {"hospitals": 2, "dimensions": 3, "size": 16, "cases": 6, "num_classes": 3}}
    model = {"name": "unet3d", "base_filters": 2, "levels": 2}
    result = run(tmp_path, rounds=1, data=data, model=model, method={"name": "fedevi"})
    assert set(result.records[0]["G"]) == {"east", "north"}


def test_a_resumed_run_gives_the_same_bytes(tmp_path):
    method = {"name": "fedevi"}
    whole = run(tmp_path / "whole", rounds=3, method=method, data=UNEVEN)
    broken = settings(tmp_path / "broken", rounds=3, method=method, data=UNEVEN)
    with pytest.raises(KeyboardInterrupt):
        wr.run(broken, listener=Watcher(crash_in_round=3, crash_at="north"))
    resumed = wr.run(broken, resume=True)
    assert resumed.params_sha256 == whole.params_sha256
    assert [r["weights"] for r in resumed.records] == [r["weights"] for r in whole.records]


def test_a_client_without_validation_cases_holds_its_weight_or_is_scored_on_training_cases(tmp_path):
    held = run(tmp_path / "hold", rounds=1, method={"name": "fedevi"}, data=UNEVEN).records[0]
    assert held["held"] == ["north"]
    assert held["weights"]["north"] == pytest.approx(1 / 12)
    assert "north" not in held["G"]
    method = {"name": "fedevi", "missing_scores": "train"}
    trained = run(tmp_path / "train", rounds=1, method=method, data=UNEVEN).records[0]
    assert trained["held"] == []
    assert trained["G"]["north"] > 0


def test_a_client_lost_while_it_is_scored_is_recorded_and_held(tmp_path, monkeypatch):
    spoil(monkeypatch, "east", lambda answer: Answer("east", failure="power cut"), task="score")
    result = run(tmp_path, method={"name": "fedevi"})
    for record in result.records:
        assert record["lost"] == {"score/east": "power cut"}
        assert record["held"] == ["east"]
        assert record["weights"]["east"] == pytest.approx(1 / 3, abs=1e-12)


def test_a_score_that_is_not_finite_is_refused_and_the_client_held(tmp_path, monkeypatch):
    def spoilt(answer):
        return Answer("east", Message(scalars={"G": math.nan, "R": 1.0}), num_examples=answer.num_examples)

    spoil(monkeypatch, "east", spoilt, task="score")
    record = run(tmp_path, rounds=1, method={"name": "fedevi"}).records[0]
    assert "score/east" in record["refused"]
    assert record["held"] == ["east"]


def test_partial_participation_keeps_weights_of_the_absent(tmp_path):
    result = run(tmp_path, rounds=3, participation=0.67, method={"name": "fedevi"})
    for before, after in itertools.pairwise(result.records):
        for name in set(after["beta"]) - set(after["clients"]):
            assert after["beta"][name] == before["beta"][name]


def test_the_authors_settings_load_and_train(tmp_path):
    config = wr.load_config(AS_RELEASED)
    objective, method = build_objective(config), build_method(config)
    assert (objective.cap, objective.cap_kind, objective.dice_mode) == (80, "hard", "plug_in")
    assert (method.reliability, method.floor_renormalise) == ("ratio", False)
    assert config.optimizer.state == "keep"
    small = [
        "rounds=1",
        "local_epochs=1",
        "data.phantom.size=16",
        "data.phantom.cases=6",
        "evaluate.overlays=0",
    ]
    small += ["model.base_filters=2", "model.levels=2", "compute.threads=1", f"output={tmp_path / 'run'}"]
    assert wr.run(AS_RELEASED, overrides=small).status == "done"


def test_other_objectives_are_refused_with_the_reason(tmp_path):
    with pytest.raises(ConfigError, match="'dice_bce' does not train"):
        wr.load_config(settings(tmp_path, method={"name": "fedevi"}, objective={"name": "dice_bce"}))
    assert not isinstance(DiceBCE(), Evidential)
    assert resolve(wr.load_config(settings(tmp_path, method={"name": "fedevi"})))["objective"]["lam"] == 0.01


@pytest.mark.parametrize(
    "wrong", [{"delta": -1}, {"reliability": "pixel"}, {"floor": 1.5}, {"missing_scores": "drop"}]
)
def test_impossible_settings_are_refused(tmp_path, wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        wr.load_config(settings(tmp_path, method={"name": "fedevi", **wrong}))
