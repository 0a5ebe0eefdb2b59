"""Times of day."""


def parse(text):
    """Minutes since midnight of "9:05", "21:30", "9:05 am", "9:30 pm"."""
    time, *half = text.split()
    hours, minutes = time.split(":")
    total = int(hours) * 60 + int(minutes)
    if half == ["pm"]:
        total += 12 * 60
    return total


def show(minutes):
    """A time of day such as "09:05"; minutes beyond a day begin anew."""
    return f"{minutes // 60}:{minutes % 60}"
