"""The manifests of `examples/kubernetes`: fields that servers know, and engines that are told what Weft takes. No cluster is here."""

import ast
import copy
import json
import re
import shlex
from pathlib import Path

import pytest
from manifests import faults
from needs import needs

import weft
from weft.vllm._options import Options

needs("yaml")

import yaml  # noqa: E402

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "kubernetes"
MANIFESTS = {path.name: list(yaml.safe_load_all(path.read_text())) for path in sorted(EXAMPLES.glob("*.yaml"))}


def of_kind(manifests, kind):
    return [one for one in manifests if one["kind"] == kind]


def pods(manifests):
    """Every pod that is described, with a name for it."""
    for one in of_kind(manifests, "Deployment"):
        yield one["metadata"]["name"], one["spec"]["template"]["spec"]
    for one in of_kind(manifests, "LLMInferenceService"):
        yield "decode", one["spec"]["template"]
        yield "prefill", one["spec"]["prefill"]["template"]


def engines(manifests):
    """The containers that serve models, with what vLLM is told."""
    for name, pod in pods(manifests):
        for container in pod["containers"]:
            # KServe's start script has a shell read this variable; elsewhere arguments are words already.
            said = [one["value"] for one in container.get("env", []) if one["name"] == "VLLM_ADDITIONAL_ARGS"]
            words = shlex.split(said[0]) if said else container.get("args", [])
            words = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
            if "--kv-transfer-config" in words:
                yield name, container, json.loads(words[words.index("--kv-transfer-config") + 1])


@pytest.mark.parametrize("name", MANIFESTS)
def test_servers_know_every_field(name):
    assert [fault for one in MANIFESTS[name] for fault in faults(one)] == []


@pytest.mark.parametrize("name", MANIFESTS)
def test_both_sides_are_told_what_weft_takes(name):
    told = list(engines(MANIFESTS[name]))
    assert sorted(one for one, _, _ in told) == ["decode", "prefill"]
    assert told[0][2] == told[1][2]
    for _, container, config in told:
        # The class is where it is said to be.
        module = Path(weft.__file__).parent.parent.joinpath(*config["kv_connector_module_path"].split("."))
        source = (module / "__init__.py" if module.is_dir() else module.with_suffix(".py")).read_text()
        assert config["kv_connector"] in ast.literal_eval(re.search(r"__all__ = (\[.*?\])", source, re.DOTALL).group(1))
        assert config["kv_role"] == "kv_both" and config["kv_load_failure_policy"] == "recompute"
        options = Options.parse(config["kv_connector_extra_config"])
        # Other pods reach the agent, at the address that it says.
        assert options.agent_settings()["listen"].startswith("0.0.0.0:")
        env = {one["name"]: one for one in container["env"]}
        assert env["WEFT_ADVERTISE"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
        assert env["WEFT_SECRET"]["valueFrom"]["secretKeyRef"] == {"name": "weft", "key": "secret"}


@pytest.mark.parametrize("name", MANIFESTS)
def test_what_selects_selects_something(name):
    manifests = MANIFESTS[name]
    labels = [one["spec"]["template"]["metadata"]["labels"] for one in of_kind(manifests, "Deployment")]
    wanted = [one["spec"]["selector"]["matchLabels"] for one in of_kind(manifests, "Deployment")]
    wanted += [one["spec"]["selector"] for one in of_kind(manifests, "Service")]
    wanted += [one["spec"]["podSelector"]["matchLabels"] for one in of_kind(manifests, "NetworkPolicy")]
    for selector in wanted:
        assert any(selector.items() <= one.items() for one in labels), selector
    for one in of_kind(manifests, "LLMInferenceService"):
        # KServe merges by this name with what it starts itself.
        assert [[container["name"] for container in pod["containers"]] for _, pod in pods([one])] == [["main"], ["main"]]


# What is done to a good manifest, and what is said of it.
SPOILED = [
    (lambda one: one["spec"]["prefill"].update(template_=one["spec"]["prefill"].pop("template")), "LLMInferenceService.spec.prefill has no field template_"),
    (lambda one: one["spec"].update(replicas="1"), "LLMInferenceService.spec.replicas is '1'"),
    (lambda one: one["spec"].update(replicas=True), "LLMInferenceService.spec.replicas is True"),
    (lambda one: one["spec"]["model"].pop("uri"), "LLMInferenceService.spec.model lacks uri"),
    (lambda one: one["spec"]["template"]["containers"][0]["env"].append({"value": "x"}), "LLMInferenceService.spec.template.containers[0].env[3] lacks name"),
    (lambda one: one["spec"]["template"]["containers"][0].update(resource={}), "LLMInferenceService.spec.template.containers[0] has no field resource"),
    (lambda one: one["spec"]["router"].update(scheduler={"conf": {}}), "LLMInferenceService.spec.router.scheduler has no field conf"),
    (lambda one: one["spec"].update(parallelism={"tensor": "2"}), "LLMInferenceService.spec.parallelism.tensor is '2'"),
    (lambda one: one.update(apiVersion="serving.kserve.io/v1"), "nobody knows 'serving.kserve.io/v1' 'LLMInferenceService'"),
    (lambda one: one["metadata"].pop("name"), "LLMInferenceService.metadata has no name"),
]


@pytest.mark.parametrize(("spoil", "told"), SPOILED, ids=[told for _, told in SPOILED])
def test_what_is_spoiled_is_told(spoil, told):
    (good,) = of_kind(MANIFESTS["llm-inference-service.yaml"], "LLMInferenceService")
    bad = copy.deepcopy(good)
    spoil(bad)
    assert told in faults(bad)
