"""Commands that make several runs and judge them: verify, bisect, audit, bench. And doctor."""
