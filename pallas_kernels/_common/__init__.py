"""What every op shares: stored operands, visibility, packing, exact merging of parts."""
