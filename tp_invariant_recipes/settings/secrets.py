# SPDX-License-Identifier: Apache-2.0
"""Secrets in what is configured, which tpi writes down: told by addresses, by the shapes of tokens, and by names.

The shapes are those of detect-secrets and what it lacks: commands, headers, and addresses whose password has an @.
Entropy tells none: a wandb key has 40 hexadecimal digits, as a commit has.
"""

import functools
import re
from typing import Any

# A name with one of these words, or with one of WHOLE between underscores, is of a secret.
WORDS = ("KEY", "TOKEN", "SECRET", "PASSW", "PASSPHRASE", "CREDENTIAL", "OAUTH")
WHOLE = ("AUTH", "PASS", "PW", "PAT", "PWD", "DSN", "SSHPASS", "PGPASS", "SIG", "SIGNATURE")
# Harmless words that contain one of them: TOKENIZERS_PARALLELISM, NUM_OF_TOKENS_PER_CHUNK_COMBINE_API.
NOT_SECRET = ("TOKENIZER", "TOKENS_PER")
# Detectors of detect-secrets, each a module and a class. Its others find numbers of accounts and high entropy.
_DETECTORS = (
    *("artifactory:Artifactory", "aws:AWSKey", "azure_storage_key:AzureStorageKey", "basic_auth:BasicAuth"),
    *("cloudant:Cloudant", "discord:DiscordBotToken", "github_token:GitHubToken", "jwt:JwtToken"),
    *("mailchimp:Mailchimp", "npm:Npm", "openai:OpenAI", "pypi_token:PypiToken", "sendgrid:SendGrid", "slack:Slack"),
    *("square_oauth:SquareOAuth", "stripe:Stripe", "telegram_token:TelegramBotToken", "twilio:TwilioKey"),
)
# What is assigned is cut: no reference to a variable, no path, number or word of YAML.
_ASSIGNED = r"[\"']?(?![$~/.\"'\s]|(?:true|false|none|null|\d{1,7})\b)"
_VALUE = rf"\s*=\s*{_ASSIGNED}"
# Lower-case names of fields have key and token in them, too (json_key, eos_token): of these only what is surely one.
_FIELD = (
    r"\b(?:[\w-]*(?:api|access|secret|private|account|license|auth|db)[_-]?key|(?:hf|hub|git\w*|api|auth|access|secret|"
    r"session|bot|wandb|mlflow|vault)[\w-]*token|token|[\w-]*(?:secret|passwd|password|passphrase|credentials?)|"
    r"(?:[\w-]*[_-])?(?:auth|pass|pw|pat|dsn)|[\w-]+[_-]pwd|(?:ssh|pg)pass)"
)
_VARIABLE = r"\b[A-Z][A-Z0-9_]*_(?:KEY|TOKEN)"
# What hides a value: its first group is kept, and the rest is cut.
_SHAPES = [
    re.compile(pattern, flags)
    for pattern, flags in (
        (r"(\b[a-z][a-z0-9+.-]*://)[^/\s:]*:[^/\s]+(?=@)", re.IGNORECASE),  # user:password@, to the last @
        (r"(\b[a-z][a-z0-9+.-]*://)[^/\s@:]{20,}(?=@)", re.IGNORECASE),  # token@
        (r"([?&](?:[\w-]*(?:token|key|secret|password|signature)|sig)=)[^&\s\"']{8,}", re.IGNORECASE),
        (rf"({_FIELD}{_VALUE})[^\s\"',;)}}\]]+", re.IGNORECASE),
        (rf"({_VARIABLE}{_VALUE})[^\s\"',;)}}\]]+", 0),
        (
            rf"(\b[\w-]*(?:passw(?:or)?d|passphrase|(?:api|access|auth)[_-]?(?:key|token))[\"']?\s*:\s*{_ASSIGNED})[^\s\"',;]+",
            re.IGNORECASE,
        ),  # of YAML, and headers
        (r"(--[\w-]*(?:password|passwd|token|secret|api-key)[ =])(?![$~/.\"'-])\S+", 0),
        (r"(\b(?:login|sshpass)\b[^;&|]*\s-p\s*)(?![$~/])\S+", 0),
        (r"(\blogin\s+(?:--relogin\s+)?)(?![$~/.\"'-])\w{16,}", 0),  # wandb login KEY
        (r"(\b(?:curl|wget)\b.*?\s(?:-u|--user)[ =]?[\"']?[^\s:\"'$]+:)(?!\$)[^\s\"']+", 0),
        (r"(\b(?:Bearer|Basic) )[\w.~+/-]{16,}=*", re.IGNORECASE),
        (r"(\b)(?:hf_|gh[pousr]_|github_pat_|glpat-|nvapi-|npm_|pypi-|sk-|xox[abeoprs]-|wandb_v1_)[\w-]{16,}", 0),
        (r"(\b)AIza[\w-]{35}|(\b)eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]+", 0),
        (r"(-----BEGIN [A-Z ]*PRIVATE KEY-----)[\s\S]*", 0),
    )
]
# What every shape of detect-secrets has in it, and no name of a field: its import takes 0.1 s, which most runs spare.
_TOKEN = re.compile(r"(?=[A-Za-z+/=-]*\d)[A-Za-z0-9+/=-]{16}|[A-Za-z0-9+/=-]{20}|://")


def named(name: str) -> bool:
    """Whether a variable of this name may hold a secret."""
    rest = name.upper()
    for word in NOT_SECRET:
        rest = rest.replace(word, "")
    return any(word in rest for word in WORDS) or bool({*re.split(r"[^A-Z0-9]+", rest)} & {*WHOLE})


def redacted(text: str) -> str:
    """Return the text with "…" instead of each secret."""
    for shape in _SHAPES:
        text = shape.sub(lambda match: f"{match[1] or ''}…", text)
    shaped = text
    for detector in _detectors() if _TOKEN.search(shaped) else ():
        for secret in filter(None, detector.analyze_string(shaped)):
            text = text.replace(secret, "…")
    return text


def without(value: Any) -> Any:
    """JSON with "…" instead of each secret, by the names of fields too."""
    if isinstance(value, dict):
        fields = {
            name: re.fullmatch(_FIELD, name, re.IGNORECASE) and isinstance(inner, str) for name, inner in value.items()
        }
        return {name: "…" if fields[name] else without(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [without(item) for item in value]
    return redacted(value) if isinstance(value, str) else value


@functools.lru_cache(4096)  # a run's texts are checked several times
def holds(text: str) -> bool:
    """Whether a text has a secret in it."""
    return redacted(text) != text


@functools.cache
def _detectors() -> list[Any]:
    from importlib import import_module

    named = (name.split(":") for name in _DETECTORS)
    return [getattr(import_module(f"detect_secrets.plugins.{module}"), f"{cls}Detector")() for module, cls in named]
