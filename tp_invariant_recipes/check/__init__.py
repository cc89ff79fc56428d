"""May this run, and as what? Every rule has one shape (rule.py); `check(config)` asks them all (configuration.py)."""
