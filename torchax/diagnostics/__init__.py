"""What users are shown: tensors in print, tracebacks, lines of their code.

And by `python -m torchax`: what is installed here, and whether it works.
"""
