"""``ort-delayed plan``, and the plan without a session that it prints."""

from __future__ import annotations

import json

from stand_ins import encoder_weights

import ort_delayed
from ort_delayed.planning import group_labels, plan_session


def test_a_budget_that_fits(command):
    status, out, err = command("plan", "model.onnx", "--ram", "256MiB")
    assert (status, err) == (0, "")
    assert out.startswith("fits into 256.0 MiB; no weight is read again")
    for row in ("headroom", "read by rows", "stay in memory", "predicted peak", "least budget"):
        assert row in out


def test_a_budget_that_does_not_fit_is_1(command):
    status, out, err = command("plan", "model.onnx", "--ram", "1MiB")
    assert (status, err) == (1, "")
    assert out.startswith("does not fit into 1.0 MiB: at least ")


def test_groups_and_json(command):
    _, out, _ = command("plan", "model.onnx", "--ram", "256MiB", "--groups")
    assert "begins at" in out
    status, out, _ = command("plan", "inline.onnx", "--ram", "256MiB", "--json")
    assert status == 0
    found = json.loads(out)
    assert found["fits"] is True
    large = sum(w.nbytes for w in encoder_weights().values() if w.nbytes >= 64 << 10)
    assert found["plan"]["mapped_bytes"] == large
    assert command("plan", "model.onnx", "--ram", "1MiB", "--json")[0] == 1


def test_the_plan_is_that_of_a_session_but_for_the_estimate(files):
    budget = ort_delayed.RamBudget.from_mib(256)
    planned = plan_session("model.onnx", budget)
    session = ort_delayed.InferenceSession("model.onnx", ram_budget=budget)
    found = session.memory_plan
    assert found is not None
    assert planned.groups == found.groups
    assert planned.weights == found.weights
    assert planned.refetched_bytes_per_run == found.refetched_bytes_per_run == 0
    assert planned.activations_bytes == 0
    assert 0 < planned.session_bytes < 32 << 20


def test_the_embedding_is_read_by_rows(files):
    by_rows = [w.name for w in plan_session("model.onnx", 256 << 20).weights if w.by_rows]
    assert by_rows == ["embeddings.word_embeddings.weight"]


def test_groups_are_called_after_their_layers(files):
    labels = group_labels(plan_session("model.onnx", 256 << 20))
    assert labels
    assert set(labels) <= {"embeddings", "layer-0000", "layer-0001", "layer-0002"}


def test_delayed_weights_are_read_at_each_run_and_the_largest_needs_memory_twice(command, files):
    assert command("convert", "model.onnx", "d.onnx")[0] == 0
    sizes = [w.nbytes for w in encoder_weights().values() if w.nbytes >= 4096]
    plan = plan_session("d.onnx", 256 << 20)
    assert (plan.delayed_bytes_per_run, plan.load_bytes, plan.mapped_bytes) == (sum(sizes), 2 * max(sizes), 0)
    assert plan.least_budget_bytes >= plan.session_bytes + 2 * max(sizes)
    assert plan.predicted_peak_bytes >= plan.session_bytes + 2 * max(sizes)
    status, out, _ = command("plan", "d.onnx", "--ram", "256MiB")
    assert status == 0
    assert out.startswith("fits into 256.0 MiB; each run reads 1.7 MiB of delayed weights\n")
    assert "delayed weight, loaded" in out
    session = ort_delayed.InferenceSession("d.onnx", ram_budget=256 << 20)
    found = session.memory_plan
    assert found is not None
    assert (found.delayed_bytes_per_run, found.load_bytes) == (plan.delayed_bytes_per_run, plan.load_bytes)
    assert found.least_budget_bytes >= found.session_bytes + 2 * max(sizes)
    assert "delayed weights, read at each run" in str(found)


def test_cpu_payloads_are_resident(command, files):
    assert command("convert", "model.onnx", "d.onnx", "--load-device", "cpu")[0] == 0
    sizes = [w.nbytes for w in encoder_weights().values() if w.nbytes >= 4096]
    plan, without = plan_session("d.onnx", 256 << 20), plan_session("model.onnx", 256 << 20)
    assert plan.delayed_bytes_per_run == 0
    assert plan.load_bytes == max(sizes)
    assert plan.session_bytes - without.session_bytes > sum(sizes) - (64 << 10)


def test_constructing_on_a_packed_model_needs_its_largest_weight_once_more(command, files):
    assert command("pack", "model.onnx", "p.onnx")[0] == 0
    plan, plain = plan_session("p.onnx", 256 << 20), plan_session("model.onnx", 256 << 20)
    largest = max(w.nbytes for w in plan.weights if not w.by_rows)
    assert plain.construction_bytes == 0
    assert largest < plan.construction_bytes <= largest + (64 << 20)
    assert plan.least_budget_bytes >= plan.construction_bytes
    assert "while constructing" in command("plan", "p.onnx", "--ram", "256MiB")[1]
    assert "while constructing" in str(plan)


def test_a_missing_or_cut_file_is_1_and_said_as_check_says_it(command, files):
    data = files / "model.onnx.data"
    for spoil in (lambda: data.write_bytes(data.read_bytes()[:-1]), data.unlink):
        spoil()
        status, out, err = command("plan", "model.onnx", "--ram", "256MiB")
        assert (status, out) == (1, "")
        fault = command("check", "model.onnx")[2].removeprefix("fault: ")
        assert err == f"ort-delayed plan: error: {fault}"


def test_directories_and_budgets_of_a_few_bytes(command):
    assert "a directory was given where a model file is needed" in command("plan", ".", "--ram", "64MiB")[2]
    assert "a directory was given where a model file is needed" in command("run", ".")[2]
    assert "no such file or directory: 'nope.onnx'" in command("inspect", "nope.onnx")[2]
    assert command("plan", "model.onnx", "--ram", "64")[1].startswith(
        "does not fit into 64 B (bytes; did you mean MiB?)"
    )
