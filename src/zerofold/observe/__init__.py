"""What a person sees: ledger and progress."""
