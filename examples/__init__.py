"""The demonstrations behind `weightferry demo`: both jobs as real processes on one machine."""
