"""Where the Hydra tree `conf/` lies: beside the package in a checkout, inside it in an installed wheel."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


def conf_dir() -> Path:
    """The folder that holds `config.yaml` and the groups."""
    inside = _PACKAGE / "conf"
    return inside if inside.is_dir() else _PACKAGE.parent / "conf"


def groups() -> dict[str, tuple[str, ...]]:
    """Every Hydra group and its options, e.g. {"numerics": ("stock",)}; names starting with _ are only bases."""
    return {
        folder.name: tuple(sorted(f.stem for f in folder.glob("*.yaml") if not f.stem.startswith("_")))
        for folder in sorted(conf_dir().iterdir())
        if folder.is_dir()
    }


def summary(group: str, option: str) -> str:
    """The first comment of an option's file: one line that says what it is."""
    lines = (conf_dir() / group / f"{option}.yaml").read_text(encoding="utf-8").splitlines()
    return next((ln[1:].strip() for ln in lines if ln.startswith("#") and "@package" not in ln), "")
