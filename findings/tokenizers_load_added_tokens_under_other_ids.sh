#!/usr/bin/env bash
# tokenizers 0.23.3: Tokenizer.from_str and from_file ignore the ids that a tokenizer.json states for added tokens which the
# vocabulary lacks: these get the next free numbers. A file whose added tokens leave a gap (the text encoder's table of
# embeddings was padded to a round number of rows first, say) thus gives ids that the encoder was not trained with. Nothing is
# printed, with the library's log on (TOKENIZERS_LOG=warn) neither, and a save writes the new ids.
# Seen on 2026-11-29:
#   [PAD], stated as 64, loads as 3 and is saved as 3
#   [MASK], stated as 65, loads as 4 and is saved as 4
#   rain [PAD] [MASK] sea: [1, 3, 4, 2]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check tokenizers==0.23.3
cat >"$folder/added.py" <<'PYTHON'
import json

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

made = Tokenizer(WordLevel({"[UNK]": 0, "rain": 1, "sea": 2}, unk_token="[UNK]"))
made.pre_tokenizer = Whitespace()
file = json.loads(made.to_str())
as_is = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
stated = {"[PAD]": 64, "[MASK]": 65}
file["added_tokens"] = [{"id": number, "content": word, **as_is} for word, number in stated.items()]
loaded = Tokenizer.from_str(json.dumps(file))
saved = {token["content"]: token["id"] for token in json.loads(loaded.to_str())["added_tokens"]}
for word, number in stated.items():
    print(f"{word}, stated as {number}, loads as {loaded.token_to_id(word)} and is saved as {saved[word]}")
text = "rain [PAD] [MASK] sea"
print(f"{text}: {loaded.encode(text).ids}")
PYTHON
diff <(TOKENIZERS_LOG=warn "$folder/venv/bin/python" "$folder/added.py" 2>&1) - <<'SEEN'
[PAD], stated as 64, loads as 3 and is saved as 3
[MASK], stated as 65, loads as 4 and is saved as 4
rain [PAD] [MASK] sea: [1, 3, 4, 2]
SEEN
