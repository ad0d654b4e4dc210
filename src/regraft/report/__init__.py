"""What people look at: tables in a terminal, a page for a browser, plots."""
