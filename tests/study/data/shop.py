"""A small made-up export of a shop, in the form of Online Retail."""

from __future__ import annotations

import csv
import random
from datetime import datetime, timedelta
from pathlib import Path

HEADER = ["InvoiceNo", "StockCode", "Description", "Quantity", "InvoiceDate", "UnitPrice", "CustomerID", "Country"]
COLUMNS = {"user": "CustomerID", "rating": "Quantity", "title": "Description"}  # the others are found by themselves
DATE_FORMAT = "%m/%d/%Y %H:%M"
READABLE = {"columns": COLUMNS, "encoding": "latin-1", "date_format": DATE_FORMAT, "drop_missing": True}


def write_shop(path: Path, *, customers: int = 25, codes: int = 30, invoices: int = 400, ids: str = "{}.0") -> Path:
    """Write purchases in Latin-1, with dates like 12/1/2010 8:26: a quarter by guests, and some that are sent back.

    Args:
        customers, codes, invoices: how many there are.
        ids: how a customer's number is written.
    """
    chance, day = random.Random(0), datetime(2010, 12, 1, 8, 26)
    with path.open("w", encoding="latin-1", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(HEADER)
        for invoice in range(536365, 536365 + invoices):
            day += timedelta(hours=chance.randrange(1, 30))
            customer, guest = chance.randrange(customers), chance.random() < 0.25
            for code in chance.sample(range(codes), 3):
                sold = [code, f"CAFÉ MUG {code}" if chance.random() < 0.9 else "", chance.randrange(1, 9)]
                rest = [f"{day.month}/{day.day}/{day.year} {day.hour}:{day.minute:02}", "2.55"]
                rest += ["" if guest else ids.format(12346 + customer), "United Kingdom"]
                writer.writerow([invoice, *sold, *rest])
                if not guest and chance.random() < 0.1:
                    writer.writerow([f"C{invoice}", *sold[:2], -sold[2], *rest])
    return path
