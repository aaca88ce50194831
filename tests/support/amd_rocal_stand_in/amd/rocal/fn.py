"""amd.rocal.fn: the operations on images, with the signatures of rocAL 2.3. Anything else is a TypeError."""

from __future__ import annotations

import inspect
from inspect import Parameter

import rocal_pybind as b

from amd.rocal import types
from amd.rocal.pipeline import Pipeline

_FLOATS = frozenset(
    [
        "angle",
        "brightness",
        "brightness_shift",
        "contrast",
        "contrast_center",
        "crop_area_factor",
        "crop_aspect_ratio",
        "exposure",
        "gamma",
        "hue",
        "ratio",
        "saturation",
        "vignette",
        "x_drift",
        "y_drift",
    ]
)
_FLAGS = frozenset(("mirror",))
_INTEGERS = frozenset(("horizontal", "vertical", "adjustment_value"))
"""The arguments above are passed as rocAL's parameter objects, whose value could be drawn at random."""


def _handle():
    return Pipeline._current_pipeline._handle


def _parameter(name, value):
    if name in _FLOATS and isinstance(value, float):
        return b.createFloatParameter(value)
    if name in _FLAGS and isinstance(value, int):
        return b.createIntParameter(0 if value == 0 else 1)
    return b.createIntParameter(value) if name in _INTEGERS and isinstance(value, int) else value


def _size_of_crop(values):
    crop = values["crop"]
    values["depth"] = crop[0] if len(crop) == 3 else values.get("crop_d")
    values["height"], values["width"] = crop[-2:] if len(crop) in (2, 3) else (values["crop_h"], values["crop_w"])


def _function(native, handed_on, keywords, parameters=True, prepare=None, inputs=1):
    """A function that passes on these keywords, in this order; `parameters`: whether as rocAL's parameter objects."""
    kinds = [Parameter(name, Parameter.KEYWORD_ONLY, default=default) for name, default in keywords.items()]
    signature = inspect.Signature([Parameter("inputs", Parameter.VAR_POSITIONAL), *kinds])

    def call(*given, **keywords):
        bound = signature.bind(*given, **keywords)
        bound.apply_defaults()
        values = {**bound.arguments, "is_output": False}
        if prepare is not None:
            prepare(values)
        names = handed_on.split()
        arguments = [_parameter(name, values[name]) if parameters else values[name] for name in names]
        return getattr(b, native)(_handle(), *given[:inputs], *arguments)

    call.__signature__ = signature
    return call


def external_source(
    source,
    device=None,
    color_format=types.RGB,
    random_shuffle=False,
    mode=types.EXTSOURCE_FNAME,
    max_width=2000,
    max_height=2000,
    last_batch_policy=types.LAST_BATCH_FILL,
    pad_last_batch_repeated=False,
    stick_to_shard=True,
    shard_size=-1,
):
    iter(source)
    sharding = b.RocalShardingInfo(last_batch_policy, pad_last_batch_repeated, stick_to_shard, shard_size)
    policy, decoder = types.USER_GIVEN_SIZE, types.DECODER_TJPEG
    tensor = b.externalFileSource(
        _handle(), color_format, False, random_shuffle, False, policy, max_width, max_height, decoder, mode, sharding
    )
    return tensor, []


_OUT = {"device": None, "output_layout": types.NHWC, "output_dtype": types.UINT8}
_FORMAT = " output_layout output_dtype"
_SCALING = {
    "max_size": [],
    "resize_longer": 0,
    "resize_shorter": 0,
    "resize_width": 0,
    "resize_height": 0,
    "scaling_mode": types.SCALING_MODE_DEFAULT,
    "interpolation_type": types.LINEAR_INTERPOLATION,
    **_OUT,
}
_CROP = {"crop": [0, 0], "crop_w": 0, "crop_h": 0, **_OUT}
_NORMALISATION = {"mean": [0.0], "std": [1.0], "mirror": 1}
_AFFINE = {"dest_width": 0, "dest_height": 0, "interpolation_type": types.LINEAR_INTERPOLATION, **_OUT}

resize = _function(
    "resize",
    "resize_width resize_height is_output scaling_mode max_size resize_shorter resize_longer interpolation_type"
    + _FORMAT,
    {**_SCALING, "antialias": True},
)
resize_mirror_normalize = _function(
    "resizeMirrorNormalize",
    "resize_width resize_height mean std is_output scaling_mode max_size resize_shorter resize_longer"
    " interpolation_type mirror" + _FORMAT,
    {**_SCALING, **_NORMALISATION},
)
resize_crop = _function(
    "cropResize",
    "resize_width resize_height is_output crop_area_factor crop_aspect_ratio x_drift y_drift" + _FORMAT,
    {**_SCALING, "crop_area_factor": None, "crop_aspect_ratio": None, "x_drift": None, "y_drift": None},
)
# rocAL's own slip: the native function takes the height first.
resize_crop_mirror = _function(
    "resizeCropMirrorFixed",
    "resize_width resize_height is_output crop_w crop_h mirror" + _FORMAT,
    {**_SCALING, "crop_w": 0, "crop_h": 0, "mirror": 1},
)
crop_mirror_normalize = _function(
    "cropMirrorNormalize",
    "height width crop_pos_x crop_pos_y mean std is_output mirror" + _FORMAT,
    {**_CROP, "crop_pos_x": 0.5, "crop_pos_y": 0.5, **_NORMALISATION},
    prepare=_size_of_crop,
)
crop = _function(
    "cropFixed",
    "width height depth is_output crop_pos_x crop_pos_y crop_pos_z" + _FORMAT,
    {**_CROP, "crop_d": 1, "crop_pos_x": 0.5, "crop_pos_y": 0.5, "crop_pos_z": 0.5},
    prepare=_size_of_crop,
)
center_crop = _function(
    "centerCropFixed", "width height depth is_output" + _FORMAT, {**_CROP, "crop_d": 1}, prepare=_size_of_crop
)
roi_resize = _function(
    "roiResize",
    "resize_width resize_height is_output roi_h roi_w roi_pos_x roi_pos_y interpolation_type" + _FORMAT,
    {
        "resize_width": 0,
        "resize_height": 0,
        "roi_w": None,
        "roi_h": None,
        "roi_pos_x": None,
        "roi_pos_y": None,
        "interpolation_type": types.LINEAR_INTERPOLATION,
        **_OUT,
    },
)
flip = _function("flip", "is_output horizontal vertical" + _FORMAT, {"horizontal": 0, "vertical": 0, **_OUT})
rotate = _function(
    "rotate",
    "is_output angle dest_width dest_height interpolation_type" + _FORMAT,
    {"angle": None, "fill_value": None, **_AFFINE},
)
warp_affine = _function(
    "warpAffineFixed",
    "x0 x1 y0 y1 o0 o1 is_output dest_height dest_width interpolation_type" + _FORMAT,
    {"matrix": [0, 0, 0, 0, 0, 0], **_AFFINE},
    prepare=lambda values: values.update(zip(("x0", "x1", "y0", "y1", "o0", "o1"), values["matrix"], strict=True)),
)
brightness = _function(
    "brightness",
    "is_output brightness brightness_shift" + _FORMAT,
    {"brightness": None, "brightness_shift": None, **_OUT},
)
# rocAL's own slip: the native function takes is_output after the numbers.
brightness_fixed = _function(
    "brightnessFixed",
    "is_output brightness brightness_shift" + _FORMAT,
    {"brightness": 1.0, "brightness_shift": 0.0, **_OUT},
    parameters=False,
)
contrast = _function(
    "contrast", "is_output contrast contrast_center" + _FORMAT, {"contrast": None, "contrast_center": None, **_OUT}
)
gamma_correction = _function("gammaCorrection", "is_output gamma" + _FORMAT, {"gamma": 0.5, **_OUT})
exposure = _function("exposure", "is_output exposure" + _FORMAT, {"exposure": 0.5, **_OUT})
hue = _function("hue", "is_output hue" + _FORMAT, {"hue": None, "seed": 0, **_OUT})
saturation = _function("saturation", "is_output saturation" + _FORMAT, {"saturation": 1.0, **_OUT})
color_twist = _function(
    "colorTwist",
    "is_output brightness contrast hue saturation" + _FORMAT,
    {"brightness": 1.0, "contrast": 1.0, "hue": 0.0, "saturation": 1.0, **_OUT},
)
color_temp = _function("colorTemp", "is_output adjustment_value" + _FORMAT, {"adjustment_value": 50, **_OUT})
blend = _function("blend", "is_output ratio" + _FORMAT, {"ratio": None, **_OUT}, inputs=2)
copy = _function("copy", "is_output", {"device": None})
nop = _function("nop", "is_output", {"device": None})
fish_eye = _function("fishEye", "is_output" + _FORMAT, {"fill_value": 0.0, **_OUT})
blur = _function("blur", "is_output" + _FORMAT, {"window_size": None, "sigma": 0.0, **_OUT})
pixelate = _function("pixelate", "is_output pixelate_percent" + _FORMAT, {"pixelate_percent": 50.0, **_OUT})
vignette = _function("vignette", "is_output vignette" + _FORMAT, {"vignette": 0.5, **_OUT})
normalize = _function(
    "normalize",
    "axes mean stddev is_output scale shift output_datatype",
    {"axes": [], "mean": [], "stddev": [], "scale": 1.0, "shift": 0.0, "output_datatype": types.FLOAT},
)
transpose = _function(
    "transpose", "perm is_output output_layout", {"perm": [], "output_layout": types.NHWC, "output_dtype": types.UINT8}
)


def lens_correction(
    *inputs,
    camera_matrix=None,
    distortion_coeffs=None,
    device=None,
    output_layout=types.NHWC,
    output_dtype=types.UINT8,
):
    # rocAL's own slip: the native function takes lists, with one for each image of a batch.
    camera, distortion = b.CameraMatrix(), b.DistortionCoeffs()
    return b.lensCorrection(_handle(), inputs[0], camera, distortion, False, output_layout, output_dtype)


def slice(*inputs, anchor=[], shape=[], fill_values=[0.0], out_of_bounds_policy=types.ERROR):  # noqa: A001, B006
    # The native function takes tensors of an audio operation here.
    raise TypeError("incompatible function arguments: anchor and shape are tensors")
