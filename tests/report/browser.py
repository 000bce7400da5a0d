"""Debian's chromium without a window, spoken to over a pipe: no driver, no port, no network."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


class Browser:
    """One page in one browser. What it complains about is kept in `complaints`, what it fetches in `requests`."""

    def __init__(self) -> None:
        assert CHROMIUM is not None
        self._profile = tempfile.TemporaryDirectory(prefix="fedhist-chromium-", ignore_cleanup_errors=True)
        from_here, self._out = os.pipe()
        self._in, to_here = os.pipe()
        flags = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
            "--no-first-run", "--disable-extensions", "--disable-background-networking",
            f"--user-data-dir={self._profile.name}", "--remote-debugging-pipe", "about:blank",
        ]  # fmt: skip
        # Chromium reads commands from descriptor 3 and writes answers to 4.
        script = f'exec "$0" "$@" 3<&{from_here} 4>&{to_here}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, CHROMIUM, *flags],
            pass_fds=(from_here, to_here),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(from_here)
        os.close(to_here)
        self._buffer, self._count = b"", 0
        self.complaints: list[str] = []
        self.requests: list[str] = []
        targets = self._send("Target.getTargets")["targetInfos"]
        page = next(t["targetId"] for t in targets if t["type"] == "page")
        self._session = self._send("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self._send("Browser.close")
            self._process.wait(20)
        finally:
            self._process.kill()
            self._process.wait()
            os.close(self._in)
            os.close(self._out)
            self._profile.cleanup()

    def _send(self, method: str, session: str | None = None, **params: Any) -> Any:
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        os.write(self._out, json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._count:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            piece = os.read(self._in, 1 << 20)
            assert piece, "chromium has gone"
            self._buffer += piece
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"].get("exception", params["exceptionDetails"])))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(" ".join(str(arg.get("value", arg)) for arg in params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def call(self, method: str, **params: Any) -> Any:
        """Give the page a command of the DevTools protocol."""
        return self._send(method, self._session, **params)

    def open(self, path: Path, width: int = 1200, height: int = 900, *, dark: bool = False) -> None:
        """Show a file and wait until all its figures are drawn."""
        self.size(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=path.resolve().as_uri())
        ready = "document.readyState === 'complete' && document.documentElement.dataset.ready === 'yes'"
        self.wait(ready)

    def size(self, width: int, height: int) -> None:
        """Give the page another size."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def wait(self, condition: str) -> None:
        """Wait until an expression is true; the browser itself gives up after half a minute."""
        script = f"""new Promise((done, fail) => {{
            const start = performance.now();
            const look = () => ({condition}) ? done(true)
                : performance.now() - start > 30000 ? fail(new Error("never true")) : setTimeout(look, 20);
            look();
        }})"""
        for _ in range(3):  # a page that is being left takes its promises along
            try:
                self.evaluate(script)
                return
            except AssertionError:
                continue
        self.evaluate(script)

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, [answer["exceptionDetails"], *self.complaints]
        return answer["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """Keep a picture of the whole page."""
        box = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": box["width"], "height": box["height"], "scale": 1}
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))

    def pdf(self, path: Path) -> None:
        """Keep the page as it would be printed."""
        path.write_bytes(base64.b64decode(self.call("Page.printToPDF", printBackground=False)["data"]))
