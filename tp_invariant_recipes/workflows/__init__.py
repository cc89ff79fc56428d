"""Commands that train several runs and judge them (verify, bisect, audit, bench), and doctor."""
