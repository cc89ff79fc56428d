"""Why some sizes must be whole vectors on a CPU: torch computes what fills none with other code, which rounds in
another way (SLEEF's and libm's exp differ), so a number's bits depend on how many stand behind it."""

# Numbers that torch's vector code on a CPU takes at a time, at most.
VECTORS = 32
