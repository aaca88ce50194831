"""amd.rocal.fn: the operations on images, with the signatures of rocAL 2.3. Anything else is a TypeError."""

from __future__ import annotations

import rocal_pybind as b

from amd.rocal import types
from amd.rocal.pipeline import Pipeline

NHWC, UINT8, FLOAT = types.NHWC, types.UINT8, types.FLOAT
DEFAULT, LINEAR = types.SCALING_MODE_DEFAULT, types.LINEAR_INTERPOLATION


def _handle():
    return Pipeline._current_pipeline._handle


def _number(value):
    return b.createFloatParameter(value) if isinstance(value, float) else value


def _integer(value):
    return b.createIntParameter(value) if isinstance(value, int) else value


def _flag(value):
    return b.createIntParameter(0 if value == 0 else 1) if isinstance(value, int) else value


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


def resize(
    *inputs,
    max_size=[],  # noqa: B006
    resize_longer=0,
    resize_shorter=0,
    resize_width=0,
    resize_height=0,
    scaling_mode=DEFAULT,
    interpolation_type=LINEAR,
    antialias=True,
    device=None,
    output_layout=NHWC,
    output_dtype=UINT8,
):
    return b.resize(
        _handle(), inputs[0], resize_width, resize_height, False, scaling_mode, max_size, resize_shorter, resize_longer,
        interpolation_type, output_layout, output_dtype,
    )  # fmt: skip


def resize_mirror_normalize(
    *inputs,
    max_size=[],  # noqa: B006
    resize_longer=0,
    resize_shorter=0,
    resize_width=0,
    resize_height=0,
    scaling_mode=DEFAULT,
    interpolation_type=LINEAR,
    mean=[0.0],  # noqa: B006
    std=[1.0],  # noqa: B006
    mirror=1,
    device=None,
    output_layout=NHWC,
    output_dtype=UINT8,
):
    return b.resizeMirrorNormalize(
        _handle(), inputs[0], resize_width, resize_height, mean, std, False, scaling_mode, max_size, resize_shorter,
        resize_longer, interpolation_type, _flag(mirror), output_layout, output_dtype,
    )  # fmt: skip


def resize_crop(
    *inputs,
    resize_width=0,
    resize_height=0,
    crop_area_factor=None,
    crop_aspect_ratio=None,
    x_drift=None,
    y_drift=None,
    device=None,
    max_size=[],  # noqa: B006
    resize_longer=0,
    resize_shorter=0,
    scaling_mode=DEFAULT,
    interpolation_type=LINEAR,
    output_layout=NHWC,
    output_dtype=UINT8,
):
    numbers = [_number(value) for value in (crop_area_factor, crop_aspect_ratio, x_drift, y_drift)]
    return b.cropResize(_handle(), inputs[0], resize_width, resize_height, False, *numbers, output_layout, output_dtype)


def resize_crop_mirror(
    *inputs,
    resize_width=0,
    resize_height=0,
    crop_w=0,
    crop_h=0,
    mirror=1,
    device=None,
    max_size=[],  # noqa: B006
    resize_longer=0,
    resize_shorter=0,
    scaling_mode=DEFAULT,
    interpolation_type=LINEAR,
    output_layout=NHWC,
    output_dtype=UINT8,
):
    # rocAL's own slip: the native function takes the height first.
    return b.resizeCropMirrorFixed(
        _handle(), inputs[0], resize_width, resize_height, False, crop_w, crop_h, _flag(mirror), output_layout,
        output_dtype,
    )  # fmt: skip


def crop_mirror_normalize(
    *inputs,
    crop=[0, 0],  # noqa: B006
    crop_pos_x=0.5,
    crop_pos_y=0.5,
    crop_w=0,
    crop_h=0,
    mean=[0.0],  # noqa: B006
    std=[1.0],  # noqa: B006
    mirror=1,
    device=None,
    output_layout=NHWC,
    output_dtype=UINT8,
):
    height, width = crop[-2:] if len(crop) in (2, 3) else (crop_h, crop_w)
    return b.cropMirrorNormalize(
        _handle(), inputs[0], height, width, crop_pos_x, crop_pos_y, mean, std, False, _flag(mirror), output_layout,
        output_dtype,
    )  # fmt: skip


def crop(
    *inputs,
    crop=[0, 0],  # noqa: B006
    crop_pos_x=0.5,
    crop_pos_y=0.5,
    crop_pos_z=0.5,
    crop_w=0,
    crop_h=0,
    crop_d=1,
    device=None,
    output_layout=NHWC,
    output_dtype=UINT8,
):
    depth = crop[0] if len(crop) == 3 else crop_d
    height, width = crop[-2:] if len(crop) in (2, 3) else (crop_h, crop_w)
    if width == 0 and height == 0:
        raise NotImplementedError("a crop of random size is for training")
    return b.cropFixed(
        _handle(), inputs[0], width, height, depth, False, crop_pos_x, crop_pos_y, crop_pos_z, output_layout,
        output_dtype,
    )  # fmt: skip


def center_crop(
    *inputs,
    crop=[0, 0],  # noqa: B006
    crop_h=0,
    crop_w=0,
    crop_d=1,
    device=None,
    output_layout=NHWC,
    output_dtype=UINT8,
):
    depth = crop[0] if len(crop) == 3 else crop_d
    height, width = crop[-2:] if len(crop) in (2, 3) else (crop_h, crop_w)
    return b.centerCropFixed(_handle(), inputs[0], width, height, depth, False, output_layout, output_dtype)


def roi_resize(
    *inputs,
    resize_width=0,
    resize_height=0,
    roi_w=None,
    roi_h=None,
    roi_pos_x=None,
    roi_pos_y=None,
    device=None,
    interpolation_type=LINEAR,
    output_layout=NHWC,
    output_dtype=UINT8,
):
    return b.roiResize(
        _handle(), inputs[0], resize_width, resize_height, False, roi_h, roi_w, roi_pos_x, roi_pos_y,
        interpolation_type, output_layout, output_dtype,
    )  # fmt: skip


def flip(*inputs, horizontal=0, vertical=0, device=None, output_layout=NHWC, output_dtype=UINT8):
    return b.flip(_handle(), inputs[0], False, _integer(horizontal), _integer(vertical), output_layout, output_dtype)


def rotate(
    *inputs,
    angle=None,
    dest_width=0,
    dest_height=0,
    interpolation_type=LINEAR,
    device=None,
    fill_value=None,
    output_layout=NHWC,
    output_dtype=UINT8,
):
    return b.rotate(
        _handle(), inputs[0], False, _number(angle), dest_width, dest_height, interpolation_type, output_layout,
        output_dtype,
    )  # fmt: skip


def warp_affine(
    *inputs,
    dest_width=0,
    dest_height=0,
    matrix=[0, 0, 0, 0, 0, 0],  # noqa: B006
    interpolation_type=LINEAR,
    device=None,
    output_layout=NHWC,
    output_dtype=UINT8,
):
    x0, x1, y0, y1, o0, o1 = matrix
    return b.warpAffineFixed(
        _handle(), inputs[0], x0, x1, y0, y1, o0, o1, False, dest_height, dest_width, interpolation_type, output_layout,
        output_dtype,
    )  # fmt: skip


def brightness(*inputs, brightness=None, brightness_shift=None, device=None, output_layout=NHWC, output_dtype=UINT8):
    return b.brightness(
        _handle(), inputs[0], False, _number(brightness), _number(brightness_shift), output_layout, output_dtype
    )


def brightness_fixed(
    *inputs, brightness=1.0, brightness_shift=0.0, device=None, output_layout=NHWC, output_dtype=UINT8
):
    # rocAL's own slip: the native function takes is_output after the numbers.
    return b.brightnessFixed(_handle(), inputs[0], False, brightness, brightness_shift, output_layout, output_dtype)


def contrast(*inputs, contrast=None, contrast_center=None, device=None, output_layout=NHWC, output_dtype=UINT8):
    return b.contrast(
        _handle(), inputs[0], False, _number(contrast), _number(contrast_center), output_layout, output_dtype
    )


def gamma_correction(*inputs, gamma=0.5, device=None, output_layout=NHWC, output_dtype=UINT8):
    return b.gammaCorrection(_handle(), inputs[0], False, _number(gamma), output_layout, output_dtype)


def exposure(*inputs, exposure=0.5, device=None, output_layout=NHWC, output_dtype=UINT8):
    return b.exposure(_handle(), inputs[0], False, _number(exposure), output_layout, output_dtype)


def hue(*inputs, hue=None, device=None, seed=0, output_layout=NHWC, output_dtype=UINT8):
    return b.hue(_handle(), inputs[0], False, _number(hue), output_layout, output_dtype)


def saturation(*inputs, saturation=1.0, device=None, output_layout=NHWC, output_dtype=UINT8):
    return b.saturation(_handle(), inputs[0], False, _number(saturation), output_layout, output_dtype)


def color_twist(
    *inputs,
    brightness=1.0,
    contrast=1.0,
    hue=0.0,
    saturation=1.0,
    device=None,
    output_layout=NHWC,
    output_dtype=UINT8,
):
    numbers = [_number(value) for value in (brightness, contrast, hue, saturation)]
    return b.colorTwist(_handle(), inputs[0], False, *numbers, output_layout, output_dtype)


def color_temp(*inputs, adjustment_value=50, device=None, output_layout=NHWC, output_dtype=UINT8):
    return b.colorTemp(_handle(), inputs[0], False, _integer(adjustment_value), output_layout, output_dtype)


def blend(*inputs, ratio=None, device=None, output_layout=NHWC, output_dtype=UINT8):
    return b.blend(_handle(), inputs[0], inputs[1], False, _number(ratio), output_layout, output_dtype)


def copy(*inputs, device=None):
    return b.copy(_handle(), inputs[0], False)


def nop(*inputs, device=None):
    return b.nop(_handle(), inputs[0], False)


def fish_eye(*inputs, device=None, fill_value=0.0, output_layout=NHWC, output_dtype=UINT8):
    return b.fishEye(_handle(), inputs[0], False, output_layout, output_dtype)


def blur(*inputs, window_size=None, sigma=0.0, device=None, output_layout=NHWC, output_dtype=UINT8):
    return b.blur(_handle(), inputs[0], False, output_layout, output_dtype)


def pixelate(*inputs, device=None, pixelate_percent=50.0, output_layout=NHWC, output_dtype=UINT8):
    return b.pixelate(_handle(), inputs[0], False, pixelate_percent, output_layout, output_dtype)


def vignette(*inputs, vignette=0.5, device=None, output_layout=NHWC, output_dtype=UINT8):
    return b.vignette(_handle(), inputs[0], False, _number(vignette), output_layout, output_dtype)


def lens_correction(
    *inputs, camera_matrix=None, distortion_coeffs=None, device=None, output_layout=NHWC, output_dtype=UINT8
):
    camera, distortion = b.CameraMatrix(), b.DistortionCoeffs()
    if isinstance(camera_matrix, list):
        camera.fx, camera.cx, camera.fy, camera.cy = camera_matrix
    if isinstance(distortion_coeffs, list):
        distortion.k1, distortion.k2, distortion.p1, distortion.p2, distortion.k3 = distortion_coeffs
    # rocAL's own slip: the native function takes lists, with one for each image of a batch.
    return b.lensCorrection(_handle(), inputs[0], camera, distortion, False, output_layout, output_dtype)


def normalize(
    *inputs,
    axes=[],  # noqa: B006
    mean=[],  # noqa: B006
    stddev=[],  # noqa: B006
    scale=1.0,
    shift=0.0,
    output_datatype=FLOAT,
):
    return b.normalize(_handle(), inputs[0], axes, mean, stddev, False, scale, shift, output_datatype)


def transpose(*inputs, perm=[], output_layout=NHWC, output_dtype=UINT8):  # noqa: B006
    return b.transpose(_handle(), inputs[0], perm, False, output_layout)


def slice(  # noqa: A001
    *inputs,
    anchor=[],  # noqa: B006
    shape=[],  # noqa: B006
    fill_values=[0.0],  # noqa: B006
    out_of_bounds_policy=types.ERROR,
    rocal_tensor_output_type=FLOAT,
):
    # The native function takes tensors of an audio operation here.
    raise TypeError("incompatible function arguments: anchor and shape are tensors")
