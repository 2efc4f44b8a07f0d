"""Token mixers: the DeltaProduct recurrence and softmax attention, both from [B, T, D] to [B, T, D]."""
