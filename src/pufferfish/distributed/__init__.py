"""Work that several processes do together: agreeing, sharing out SVDs, re-wrapping DDP, exact averages."""
