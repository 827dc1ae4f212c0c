"""Records, random streams, sampling and the accept / replace laws of speculative decoding."""
