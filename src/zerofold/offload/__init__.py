"""Which unit's states go to which memory: the wish, the machine, the sizes, and the plan made of them."""
