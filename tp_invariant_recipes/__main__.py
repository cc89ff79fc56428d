# SPDX-License-Identifier: Apache-2.0
"""`python -m tp_invariant_recipes` is `tpi`, where the script is not on PATH."""

from tp_invariant_recipes.cli.main import main

if __name__ == "__main__":
    main()
