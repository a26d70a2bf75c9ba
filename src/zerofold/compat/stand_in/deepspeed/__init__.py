"""Answers `import deepspeed` with zerofold.compat.deepspeed, for programs that have this folder first on their path."""

from zerofold.compat.deepspeed.standing_in import answer_to

answer_to(__name__)
