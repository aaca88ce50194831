#!/usr/bin/env bash
# watchdog 7.1.0 on Linux: a folder that is moved out of the watched tree is reported as deleted, but its inotify watch stays.
# A file that is written in it later, somewhere else on the disk, is reported under the path that no longer exists.
# Seen on 2026-11-28:
#   moved away: DirDeletedEvent /watched/model
#   written elsewhere: FileCreatedEvent /watched/model/file
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check watchdog==7.1.0
mkdir -p "$folder/root/watched/model" "$folder/root/elsewhere"
cat >"$folder/moves.py" <<'PYTHON'
import queue
import sys
from pathlib import Path

from watchdog.events import FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer

root = Path(sys.argv[1])
events: queue.Queue[FileSystemEvent] = queue.Queue()


class Handler(FileSystemEventHandler):
    def on_any_event(self, event: FileSystemEvent) -> None:
        events.put(event)


def first(kind: str) -> str:
    while True:
        event = events.get(timeout=30)
        if type(event).__name__ == kind:
            return f"{kind} {event.src_path.removeprefix(str(root))}"


observer = Observer()
observer.schedule(Handler(), str(root / "watched"), recursive=True)
observer.start()
(root / "watched" / "model").rename(root / "elsewhere" / "model")
print("moved away:", first("DirDeletedEvent"))
(root / "elsewhere" / "model" / "file").touch()
print("written elsewhere:", first("FileCreatedEvent"))
observer.stop()
PYTHON
diff <("$folder/venv/bin/python" "$folder/moves.py" "$folder/root") - <<'SEEN'
moved away: DirDeletedEvent /watched/model
written elsewhere: FileCreatedEvent /watched/model/file
SEEN
