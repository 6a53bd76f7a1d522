"""A page in headless Chromium, by its debugging pipe: no driver is needed, only the browser itself."""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
#: Generous: other tests share the cores.
_SECONDS = 60.0


class Page:
    """One page. `errors` has what the console said of failures."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading = os.fdopen(reading, "rb", buffering=0)
        self._writing = os.fdopen(writing, "wb", buffering=0)
        self._ids = itertools.count(1)
        self._session: str | None = None
        self._pending = b""
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the DevTools protocol and its answer."""
        number = next(self._ids)
        session = {} if self._session is None else {"sessionId": self._session}
        command = {"id": number, "method": method, "params": params, **session}
        self._writing.write(json.dumps(command).encode() + b"\0")
        while True:
            message = self._read()
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]
            entry = message.get("params", {}).get("entry")
            if message.get("method") == "Log.entryAdded" and entry["level"] == "error":
                self.errors.append(f"{entry['text']} {entry.get('url', '')}")
            if message.get("method") == "Runtime.exceptionThrown":
                self.errors.append(str(message["params"]["exceptionDetails"]))

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._pending:
            data = self._reading.read(1 << 16)
            assert data, "the browser went away"
            self._pending += data
        message, self._pending = self._pending.split(b"\0", 1)
        return json.loads(message)

    def open(self, url: str, *, width: int = 1280, height: int = 800) -> None:
        """Loads a page, in a window of a size."""
        mobile = width < 600
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, condition: str) -> None:
        """Waits until an expression is true."""
        end = time.monotonic() + _SECONDS
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < end, f"{condition} stays false; {self.run('document.body.innerText')!r}"
            time.sleep(0.02)

    def type(self, text: str) -> None:
        """Writes into what has the focus."""
        self.call("Input.insertText", text=text)

    def enter(self) -> None:
        """Presses Enter in what has the focus."""
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
        self.call("Input.dispatchKeyEvent", type="keyDown", **key)
        self.call("Input.dispatchKeyEvent", type="keyUp", **key)

    def click(self, selector: str) -> None:
        """Clicks in the middle of an element."""
        box = self.run(f"document.querySelector({selector!r}).getBoundingClientRect().toJSON()")
        place = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
        for event in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=event, button="left", clickCount=1, **place)

    def screenshot(self, path: Path) -> None:
        """Writes what is to be seen as a PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """A page of a browser that keeps what it keeps in an empty folder."""
    assert CHROMIUM is not None
    to_browser, from_browser = os.pipe(), os.pipe()
    ours = to_browser[1], from_browser[0]
    theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (to_browser[0], from_browser[1])]
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    command = [CHROMIUM, *flags, "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]

    def place() -> None:  # the browser reads from 3 and writes to 4
        for fd, number in zip(theirs, (3, 4), strict=True):
            os.dup2(fd, number)

    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, pass_fds=(3, 4), preexec_fn=place, **quiet)
    for fd in (to_browser[0], from_browser[1], *theirs):
        os.close(fd)
    page = Page(ours[1], ours[0])
    try:
        yield page
    finally:
        page._writing.close()
        page._reading.close()
        process.kill()
        process.wait()
