"""Loads a model into a worker with MIGraphX.

Calls that may take long or crash run in children of the worker (`compiling/`): compiling, and the first load and run of
every program. The worker loads only programs that a child has tried.

A compiled program (.mxr) comes from the user and is not trusted: its header is checked without loading it, then a child
loads and runs it once. A file that crashes the child is not tried again in the same environment. If the file cannot be
used and an ONNX file lies next to it, the ONNX file is compiled instead.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from rocserve.backends.base import LoadedModel, ModelSource
from rocserve.backends.migraphx.binding import DimensionRange
from rocserve.backends.migraphx.compiling.context import CompileContext, open_compile_context
from rocserve.backends.migraphx.compiling.memory import ProgramMemory, check_memory
from rocserve.backends.migraphx.compiling.onnx_graph import read_onnx_graph
from rocserve.backends.migraphx.compiling.probe_jobs import InspectResult, ProbeJob
from rocserve.backends.migraphx.compiling.program_cache import LoadTrial, load_trial_key
from rocserve.backends.migraphx.compiling.recipe import ProgramRecipe, ProgramSource, SourceKind
from rocserve.backends.migraphx.model import MigraphxModel, load_compiled
from rocserve.backends.migraphx.model_check import CheckedModel, ModelCheck
from rocserve.backends.migraphx.mxr_file import check_mxr, sibling_model
from rocserve.backends.migraphx.program_runner import ProgramRunner, ProgramTensors
from rocserve.backends.migraphx.tensors import batch_range
from rocserve.cache.digests import file_digest
from rocserve.core.errors import ServeError, invalid_argument
from rocserve.jobs.messages import JobError
from rocserve.load_check.rows import couples, doubt_of

_LOG = logging.getLogger(__name__)


def _load_program(context: CompileContext, path: Path) -> MigraphxModel:
    model, target = context.model, context.options.target
    check_mxr(path, context.environment, target)
    digest = file_digest(path)
    source = ProgramSource(SourceKind.ONNX, str(path), digest)
    recipe = ProgramRecipe(source, context.options, context.environment)
    check_memory(model.name, ProgramMemory(recipe, path.stat().st_size, 0, None), model.device)
    trials, key = context.compiler.cache.load_trials, load_trial_key(digest, context.environment, target.value)
    known = trials.find(key)
    if known is not None and known.crash:
        raise invalid_argument(
            f"{path.name} has crashed MIGraphX before, and is not tried again until it changes: {known.crash}"
        )
    if known is None:
        trial = LoadTrial(model.name, path.name, context.environment.migraphx_version)
        limit = context.serving.compile_timeout_seconds
        try:
            context.compiler.runner.run(ProbeJob(model.name, str(path)), InspectResult, timeout_seconds=limit)
        except JobError as error:
            # Only a crash is remembered: another time limit, or more memory, may change any other failure.
            if error.is_crash:
                trials.remember(key, replace(trial, crash=error.text))
            raise
        trials.remember(key, trial)
    program = context.open_program(path)
    tensors = ProgramTensors(
        *_tensor_names(context, path, len(program.outputs)), pad_with_first_row=context.serving.pad_with_first_row
    )
    layout = tensors.layout(program)
    varying = batch_range(program.parameters.values())
    # The batch sizes that the file was compiled for. Smaller batches are padded, larger ones run in pieces.
    largest, rows = model.config.max_batch_size, varying
    if varying is not None and largest > varying.most:
        raise invalid_argument(
            f"model '{model.name}' has max_batch_size {largest}, but {path.name} takes batches of {varying.least} to"
            f" {varying.most} rows; lower max_batch_size to {varying.most}"
        )
    if varying is None and largest and layout.inputs:
        size = layout.inputs[0].shape[0] if layout.inputs[0].shape else 0
        rows = DimensionRange(size, size)
    if rows is not None:
        layout.check_batch(rows.least, model.name)
    check = ModelCheck(context)
    try:
        sibling = sibling_model(path)
        checked = CheckedModel(
            sibling,
            digest if sibling is None else digest + file_digest(sibling),
            {tensor.name: tensor.shape[rows is not None :] for tensor in layout.inputs},
            replace(tensors, rows=rows),
            precision="",
            batches=rows is not None,
            file_batch=0 if rows is None or varying else rows.most,
        )
        check.check_rows(checked, program_file=str(path))
        check.compiled_program(checked, path, rows)
    finally:
        check.close()
    loaded = replace(tensors, rows=rows).open(program)
    model.report("")
    signature = replace(
        layout.signature(rows is not None),
        max_batch_size=varying.most if varying else None,
        dependent_rows=doubt_of(check.rows),
    )
    runner = ProgramRunner(model.name, loaded, doubt_of(check.rows) if couples(check.rows) else "")
    # The file does not say in which precision it was compiled.
    return MigraphxModel(context, signature, runner, {"precision": ""}, check)


def _tensor_names(context: CompileContext, path: Path, outputs: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of inputs and outputs. A program knows its inputs' names but not their order, and its outputs'
    order but not their names. Outputs have the configuration's names, else those in the ONNX file next to the program,
    else output_0, output_1 and so on. Inputs have the configuration's order, else the file's."""
    config = context.model.config
    sibling, graph = sibling_model(path), None
    with suppress(ServeError):
        graph = read_onnx_graph(sibling, (context.model.model_folder,)) if sibling else None
    own = tuple(tensor.name for tensor in graph.outputs) if graph else ()
    known = own if len(own) == outputs else tuple(f"output_{index}" for index in range(outputs))
    configured = tuple(tensor.name for tensor in config.outputs)
    inputs = tuple(tensor.name for tensor in config.inputs or (graph.inputs if graph else ()))
    if set(configured) <= set(known):
        return inputs, known
    if len(configured) != outputs:
        raise invalid_argument(
            f"model '{context.model.name}' has {len(configured)} outputs in its configuration, but {path.name} has"
            f" {outputs} without names; name all of them, in the program's order"
        )
    return inputs, configured


def load(model: ModelSource) -> LoadedModel:
    """Load a model; `options.py` describes its parameters. The model is ready with its first program; more programs
    may follow while it serves. Raises ServeError if MIGraphX cannot be used here or cannot compile the model (with
    MIGraphX's own text and a remedy), if the file or the configuration is wrong, or if memory does not suffice."""
    context = open_compile_context(model, _LOG)
    # Only the backend migraphx has compiled programs; the models of other backends are compiled here.
    if model.config.backend != "migraphx":
        return load_compiled(context)
    try:
        return _load_program(context, model.model_file)
    except ServeError as error:
        sibling = sibling_model(model.model_file)
        if sibling is None:
            raise
        note = f"{sibling.name} is compiled instead of {model.model_file.name}: {error.text}"
    _LOG.warning("model '%s': %s", model.name, note)
    return load_compiled(context, sibling, note)
