"""What people look at: tables and curves."""
