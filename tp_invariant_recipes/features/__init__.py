# SPDX-License-Identifier: Apache-2.0
"""Commands as folders, each whole: workflow.py plans and judges, rank.py is what ranks do, page.py its page."""
