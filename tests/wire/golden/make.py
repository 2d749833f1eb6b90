"""Write the golden frames anew; only together with a new protocol version.

python tests/wire/golden/make.py --i-am-changing-the-protocol
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from wire.frames import VERSION, Frame, FrameType, pack


def main() -> None:
    if sys.argv[1:] != ["--i-am-changing-the-protocol"]:
        sys.exit("golden frames never change within a protocol version: see docs/wire-protocol.md")
    session = bytes(range(16))
    entries = {}
    for number, kind in enumerate(FrameType):
        frame = Frame(
            type=kind,
            session=session,
            payload=bytes(range(number, 3 * number)),
            chunk=number * 1000,
            part=number,
            epoch=number * 7,
            sequence=2**32 - 1 - number,
        )
        entries[kind.name.lower()] = {
            "type": kind.name,
            "session": session.hex(),
            "payload": bytes(frame.payload).hex(),
            "chunk": frame.chunk,
            "part": frame.part,
            "epoch": frame.epoch,
            "sequence": frame.sequence,
            "bytes": pack(frame).hex(),
        }
    path = Path(__file__).parent / f"frames-v{VERSION}.json"
    path.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
