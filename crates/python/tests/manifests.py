"""Which fields Kubernetes' objects have, as far as our manifests use them or might be misspelt: written by hand after the schema of KServe's LLMInferenceService (v1alpha2, of August 2026)
and Kubernetes' API reference. A server refuses fields that it does not know, or drops them in silence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Each:
    """A list of such things, or a mapping from names to them."""

    of: Any
    named: bool = False


@dataclass(frozen=True)
class Fields:
    """An object with these fields, of which some have to be there."""

    known: dict[str, Any]
    needed: tuple[str, ...] = ()


TEXT, NUMBER, YES_NO, ANYTHING = str, int, bool, object
NAMES = Each(TEXT, named=True)
QUANTITIES = Each((str, int), named=True)
REFERENCE = Fields({"name": TEXT, "key": TEXT, "optional": YES_NO}, ("key",))
ENV = Fields(
    {
        "name": TEXT,
        "value": TEXT,
        "valueFrom": Fields({"secretKeyRef": REFERENCE, "configMapKeyRef": REFERENCE, "fieldRef": Fields({"apiVersion": TEXT, "fieldPath": TEXT}, ("fieldPath",)),
                             "resourceFieldRef": ANYTHING, "fileKeyRef": ANYTHING}),
    },
    ("name",),
)  # fmt: skip
PROBE = Fields({
    "httpGet": Fields({"path": TEXT, "port": (int, str), "scheme": TEXT, "host": TEXT, "httpHeaders": ANYTHING}, ("port",)), "exec": ANYTHING, "tcpSocket": ANYTHING,
    "grpc": ANYTHING, "initialDelaySeconds": NUMBER, "periodSeconds": NUMBER, "timeoutSeconds": NUMBER, "failureThreshold": NUMBER, "successThreshold": NUMBER,
    "terminationGracePeriodSeconds": NUMBER,
})  # fmt: skip
CONTAINER = Fields(
    {
        "args": Each(TEXT), "command": Each(TEXT), "env": Each(ENV), "envFrom": ANYTHING, "image": TEXT, "imagePullPolicy": TEXT, "lifecycle": ANYTHING, "livenessProbe": PROBE,
        "name": TEXT, "ports": Each(Fields({"containerPort": NUMBER, "hostIP": TEXT, "hostPort": NUMBER, "name": TEXT, "protocol": TEXT}, ("containerPort",))),
        "readinessProbe": PROBE, "resources": Fields({"limits": QUANTITIES, "requests": QUANTITIES, "claims": ANYTHING}), "restartPolicy": TEXT, "securityContext": ANYTHING,
        "startupProbe": PROBE, "volumeMounts": Each(Fields({"mountPath": TEXT, "name": TEXT, "readOnly": YES_NO, "subPath": TEXT}, ("mountPath", "name"))), "workingDir": TEXT,
    },
    ("name",),
)  # fmt: skip
POD = Fields(
    {
        "containers": Each(CONTAINER), "initContainers": Each(CONTAINER), "volumes": Each(Fields({"name": TEXT, "emptyDir": ANYTHING, "secret": ANYTHING, "configMap": ANYTHING,
        "persistentVolumeClaim": ANYTHING, "hostPath": ANYTHING}, ("name",))), "affinity": ANYTHING, "hostNetwork": YES_NO, "hostIPC": YES_NO, "imagePullSecrets": ANYTHING,
        "nodeSelector": NAMES, "securityContext": ANYTHING, "serviceAccountName": TEXT, "terminationGracePeriodSeconds": NUMBER, "tolerations": ANYTHING,
        "topologySpreadConstraints": ANYTHING, "restartPolicy": TEXT,
    },
    ("containers",),
)  # fmt: skip
METADATA = Fields({"name": TEXT, "namespace": TEXT, "labels": NAMES, "annotations": NAMES})
PARALLELISM = Fields({"data": NUMBER, "dataLocal": NUMBER, "dataRPCPort": NUMBER, "expert": YES_NO, "pipeline": NUMBER, "tensor": NUMBER})
# What decode engines and prefill engines have in common.
WORKLOAD = {
    "annotations": NAMES, "kvCacheOffloading": ANYTHING, "labels": NAMES, "parallelism": PARALLELISM, "replicas": NUMBER, "rolloutStrategy": ANYTHING, "scaling": ANYTHING,
    "template": POD, "worker": POD,
}  # fmt: skip
LLM_INFERENCE_SERVICE = Fields(
    {
        **WORKLOAD,
        "baseRefs": Each(Fields({"name": TEXT}, ("name",))),
        "model": Fields({"confidential": ANYTHING, "lora": ANYTHING, "name": TEXT, "uri": TEXT}, ("uri",)),
        "prefill": Fields(WORKLOAD),
        "router": Fields({"gateway": ANYTHING, "ingress": ANYTHING, "route": ANYTHING, "scheduler": Fields({"annotations": NAMES, "config": ANYTHING, "labels": NAMES, "pool": ANYTHING,
                          "replicas": NUMBER, "template": POD, "tokenizer": ANYTHING})}),
        "storageInitializer": Fields({"enabled": YES_NO}),
        "tracing": ANYTHING,
    },
    ("model",),
)  # fmt: skip
LABELS = Fields({"matchLabels": NAMES, "matchExpressions": ANYTHING})
PEER = Fields({"podSelector": LABELS, "namespaceSelector": LABELS, "ipBlock": ANYTHING})
PORT = Fields({"port": (int, str), "endPort": NUMBER, "protocol": TEXT})
KINDS: dict[tuple[str, str], dict[str, Any]] = {
    ("serving.kserve.io/v1alpha2", "LLMInferenceService"): {"spec": LLM_INFERENCE_SERVICE},
    ("v1", "Secret"): {"type": TEXT, "stringData": NAMES, "data": NAMES, "immutable": YES_NO},
    ("v1", "Service"): {"spec": Fields({"selector": NAMES, "ports": Each(Fields({"port": NUMBER, "targetPort": (int, str), "name": TEXT, "protocol": TEXT}, ("port",))),
                                        "type": TEXT, "clusterIP": TEXT}, ("ports",))},
    ("apps/v1", "Deployment"): {"spec": Fields({"replicas": NUMBER, "selector": LABELS, "template": Fields({"metadata": METADATA, "spec": POD}, ("spec",)), "strategy": ANYTHING,
                                                "minReadySeconds": NUMBER, "progressDeadlineSeconds": NUMBER}, ("selector", "template"))},
    ("networking.k8s.io/v1", "NetworkPolicy"): {"spec": Fields({"podSelector": LABELS, "policyTypes": Each(TEXT), "ingress": Each(Fields({"from": Each(PEER), "ports": Each(PORT)})),
                                                                "egress": Each(Fields({"to": Each(PEER), "ports": Each(PORT)}))}, ("podSelector",))},
}  # fmt: skip


def faults(manifest: Any) -> list[str]:
    """What a server would not take as it is meant, each with where it is."""
    if not isinstance(manifest, dict):
        return ["it is no object"]
    kind = KINDS.get((manifest.get("apiVersion"), manifest.get("kind")))
    if kind is None:
        return [f"nobody knows {manifest.get('apiVersion')!r} {manifest.get('kind')!r}"]
    whole = Fields({"apiVersion": TEXT, "kind": TEXT, "metadata": METADATA, **kind}, ("metadata", *(["spec"] if "spec" in kind else [])))
    found = _faults(whole, manifest, manifest["kind"])
    return found if manifest.get("metadata", {}).get("name") else [*found, f"{manifest['kind']}.metadata has no name"]


def _faults(rule: Any, value: Any, at: str) -> list[str]:
    if isinstance(rule, Each):
        if not isinstance(value, dict if rule.named else list):
            return [f"{at} is {value!r}, and has to be {'a mapping' if rule.named else 'a list'}"]
        items = value.items() if rule.named else enumerate(value)
        return [fault for name, item in items for fault in _faults(rule.of, item, f"{at}[{name}]")]
    if isinstance(rule, Fields):
        if not isinstance(value, dict):
            return [f"{at} is {value!r}, and has to be an object"]
        found = [f"{at} has no field {name}" for name in value.keys() - rule.known.keys()]
        found += [f"{at} lacks {name}" for name in rule.needed if name not in value]
        return found + [fault for name, item in value.items() if name in rule.known for fault in _faults(rule.known[name], item, f"{at}.{name}")]
    # A truth value is a number to Python.
    is_right = rule is object or (isinstance(value, rule) and (rule is bool or not isinstance(value, bool)))
    return [] if is_right else [f"{at} is {value!r}"]
