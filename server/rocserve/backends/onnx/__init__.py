"""Describes the onnx backend: ONNX models on MIGraphX or ONNX Runtime."""

from __future__ import annotations

from rocserve.backends.base import BackendSpec
from rocserve.backends.migraphx import options as migraphx_options
from rocserve.backends.migraphx.engine_choice import MIGRAPHX
from rocserve.backends.onnx.engine_choice import ONNXRUNTIME, choose_engine
from rocserve.backends.onnx.provider_options import CUDA, MIGRAPHX_PROVIDER, OPENVINO, ROCM
from rocserve.backends.written_sizes import SIZES, VALUES

BACKEND = BackendSpec(
    name="onnx",
    platforms=("onnx_onnxv1", "onnxruntime_onnx", "onnxruntime"),
    engines=(ONNXRUNTIME, MIGRAPHX),
    model_filenames=("model.onnx",),
    file_endings=(".onnx",),
    takes_ragged_batches=True,
    takes_operators=True,
    models_are_data=True,
    # The operator of nodes that hold an execution provider's compiled program.
    marks_of_programs=(b"EPContext",),
    request_parameters=(
        migraphx_options.REQUEST_PARAMETERS
        # Of ONNX Runtime's `session.*` entries only numbers and switches, because other entries name folders to read
        # weights from, or files to write.
        | frozenset(
            {
                "enable_mem_arena",
                "enable_mem_pattern",
                "execution_mode",
                "graph_optimization_level",
                "inter_op_thread_count",
                "intra_op_thread_count",
                "session.disable_aot_function_inlining",
                "session.disable_double_qdq_remover",
                "session.disable_prepacking",
                "session.disable_quant_qdq",
                "session.dynamic_block_base",
                "session.enable_quant_qdq_cleanup",
                "session.force_spinning_stop",
                "session.inter_op.allow_spinning",
                "session.intra_op.allow_spinning",
                "session.set_denormal_as_zero",
                "session.strict_shape_type_inference",
            }
        )
        | {
            name
            for kind in (CUDA, ROCM, OPENVINO, MIGRAPHX_PROVIDER)
            for name in (*kind.options, *kind.ignored)
            # It names a folder that OpenVINO writes to.
            if name != "cache_dir"
        }
        | {SIZES, VALUES}
    ),
    choose_engine=choose_engine,
)
