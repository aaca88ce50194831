"""Compares the objects on standard input (YAML) with KServe's types, and the Kubernetes types in them: prints unknown
and missing fields, and fields of a wrong type. Runs in the Python of an environment that has `kserve`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

import kserve.models
import kubernetes.client.models as kubernetes_models
import yaml

VERSIONS = {"serving.kserve.io/v1alpha1": "V1alpha1", "serving.kserve.io/v1beta1": "V1beta1"}
PRIMITIVES = {"str": str, "int": int, "bool": bool, "float": float, "object": object}


def faults(value: Any, expected: str, path: str) -> Iterator[str]:
    """`expected`: a type in the notation of openapi_types, such as list[V1Container] or dict(str, str)."""
    if found := re.fullmatch(r"[lL]ist\[(.*)\]", expected):
        if not isinstance(value, list):
            yield f"{path}: not a list"
            return
        for index, entry in enumerate(value):
            yield from faults(entry, found[1], f"{path}[{index}]")
    elif found := re.fullmatch(r"[dD]ict[\[(]str, *(.*)[\])]", expected):
        for key, entry in value.items():
            yield from faults(entry, found[1], f"{path}.{key}")
    elif expected in PRIMITIVES:
        if not isinstance(value, PRIMITIVES[expected]):
            yield f"{path}: {value!r} is not {expected}"
    elif model := getattr(kserve.models, expected, None) or getattr(kubernetes_models, expected, None):
        yield from _of_model(value, model, path)
    elif not isinstance(value, str | int):  # ResourceQuantity and similar types
        yield f"{path}: nobody knows what a {expected} is"


def _of_model(value: Any, model: Any, path: str) -> Iterator[str]:
    names = {json_name: name for name, json_name in model.attribute_map.items()}
    known = {names[key]: entry for key, entry in value.items() if key in names}
    yield from (f"{path}.{key}: unknown" for key in value if key not in names)
    try:
        model(**known)
    except ValueError as error:
        yield f"{path}: {error}"
    for name, entry in known.items():
        yield from faults(entry, model.openapi_types[name], f"{path}.{model.attribute_map[name]}")


for document in yaml.safe_load_all(sys.stdin):
    for fault in faults(document, VERSIONS[document["apiVersion"]] + document["kind"], document["metadata"]["name"]):
        print(fault)
