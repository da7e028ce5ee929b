"""Pages: write results into documents; here is which result fills which part of which page."""
