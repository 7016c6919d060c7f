"""Control a headless Chromium through its pipe. Only the browser must be installed.

    apt-get install chromium

https://chromedevtools.github.io/devtools-protocol describes the commands.
"""

import base64
import contextlib
import functools
import http.server
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
PHONE, DESKTOP = 390, 1280  # pixels wide


def found() -> str | None:
    """Return the path of the browser, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """A page in a browser. `requests` are the addresses that it has requested."""

    def __init__(self, browser: "Browser", target: str) -> None:
        self.browser, self.target = browser, target
        self.requests: list[str] = []
        attached = browser.send("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        browser.pages[self.session] = self
        for domain in ("Page", "Network", "Runtime"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        return self.browser.send(method, self.session, **params)

    def go(self, address: str) -> None:
        """Open an address. Return when the page and its resources are loaded."""
        self.send("Page.navigate", url=address)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        answer = self.send(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait(self, script: str, seconds: float = 60) -> None:
        """Return when an expression is true."""
        end = time.monotonic() + seconds
        while not self.run(script):
            if time.monotonic() > end:
                raise TimeoutError(script)
            time.sleep(0.02)

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Save the visible part of the page, or the `whole` page, as a PNG."""
        options: dict[str, Any] = {}
        if whole:
            width, height = (self.run(f"document.body.scroll{s}") for s in ("Width", "Height"))
            clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
            options = {"captureBeyondViewport": True, "clip": clip}
        shot = self.send("Page.captureScreenshot", **options)
        path.write_bytes(base64.b64decode(shot["data"]))


class Browser:
    """A process of Chromium. `Browser.open` opens pages."""

    def __init__(self, executable: str, profile: str) -> None:
        self.pages: dict[str, Page] = {}
        self.received, self.last = b"", 0
        # The browser reads commands where it finds file 3, and answers in file 4.
        to_read, self.commands = (_high(file) for file in os.pipe())
        self.answers, to_write = (_high(file) for file in os.pipe())
        options = (
            f"--user-data-dir={profile} --headless --no-sandbox --disable-gpu --hide-scrollbars"
        )
        arguments = [executable, *options.split(), "--remote-debugging-pipe", "about:blank"]
        files = [(os.POSIX_SPAWN_OPEN, i, os.devnull, os.O_RDWR, 0) for i in range(3)]
        files += [(os.POSIX_SPAWN_DUP2, to_read, 3), (os.POSIX_SPAWN_DUP2, to_write, 4)]
        self.process = os.posix_spawn(executable, arguments, os.environ, file_actions=files)
        os.close(to_read)
        os.close(to_write)

    def send(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Send a command, and wait for its answer."""
        self.last += 1
        message = {"id": self.last, "method": method, "params": params}
        message |= {"sessionId": session} if session else {}
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while (answer := self._received()).get("id") != self.last:
            if answer.get("method") == "Network.requestWillBeSent":
                request = answer["params"]["request"]["url"]
                self.pages[answer["sessionId"]].requests.append(request)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def _received(self) -> dict[str, Any]:
        while b"\0" not in self.received:
            piece = os.read(self.answers, 1 << 20)
            if not piece:
                raise EOFError("the browser has ended")
            self.received += piece
        message, _, self.received = self.received.partition(b"\0")
        return json.loads(message)

    def open(
        self, address: str, *, width: int = DESKTOP, dark: bool = False, scripts: bool = True
    ) -> Page:
        """Open a page on a screen of a width, in light or dark, with or without JavaScript."""
        context = self.send("Target.createBrowserContext")  # a context without stored data
        target = self.send("Target.createTarget", url="about:blank", **context)
        page = Page(self, target["targetId"])
        is_phone = width <= PHONE
        page.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=844 if is_phone else 800,
            deviceScaleFactor=2 if is_phone else 1,
            mobile=is_phone,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.send("Emulation.setEmulatedMedia", features=[scheme])
        page.send("Emulation.setScriptExecutionDisabled", value=not scripts)
        page.go(address)
        return page

    def close(self) -> None:
        with contextlib.suppress(EOFError, BrokenPipeError):
            self.send("Browser.close")
        os.waitpid(self.process, 0)
        os.close(self.commands)
        os.close(self.answers)


def _high(file: int) -> int:
    """Duplicate a file descriptor to a number above those that the browser uses."""
    import fcntl

    copy = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(file)
    return copy


@contextlib.contextmanager
def started(executable: str) -> Iterator[Browser]:
    """Run a browser until the end of the block."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(executable, profile)
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder until the end of the block. Return its address."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
