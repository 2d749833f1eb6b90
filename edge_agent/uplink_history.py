"""What the planner has learned about this site's uplink, kept across restarts.

One small JSON file beside the store, written whole or not at all. Invariant: a file that cannot be read
costs what it knew and nothing else: it is logged, and learning starts over. Must not know: planning.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from pathlib import Path

from planner import InvalidHistory, SiteModel
from telemetry import Event, get_logger

FILE_NAME = "uplink-history.json"

_log = get_logger("edge_agent")


class UplinkHistory:
    """The site's model and the file it lives in."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE_NAME
        self.site = self._load()
        self._writing = threading.Lock()

    def _load(self) -> SiteModel:
        try:
            plain = json.loads(self._path.read_text(encoding="utf-8"))
            if not isinstance(plain, dict):
                raise InvalidHistory("link history is not an object")
            return SiteModel.from_plain(plain)
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            _log.warning(Event.UPLINK_FORGOTTEN, path=str(self._path), error=str(error))
        return SiteModel()

    def snapshot(self) -> str:
        """Return what is known now, on the thread that teaches the site."""
        return json.dumps(self.site.to_plain())

    def write(self, snapshot: str) -> None:
        """Write a snapshot; from any thread. A full disk is not worth failing a request for."""
        part = self._path.with_suffix(".part")
        with self._writing:
            try:
                part.write_text(snapshot, encoding="utf-8")
                os.replace(part, self._path)
            except OSError as error:
                _log.warning(Event.UPLINK_FORGOTTEN, path=str(self._path), error=str(error))
                with contextlib.suppress(OSError):
                    part.unlink()
