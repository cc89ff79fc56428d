# SPDX-License-Identifier: Apache-2.0
"""`python -m tp_invariant_recipes.nemo [-m] SCRIPT ARGUMENTS…`: the command that the plugin makes of a script."""

import sys

from tp_invariant_recipes.nemo import task

if __name__ == "__main__":
    sys.exit(task.main(sys.argv[1:]))
