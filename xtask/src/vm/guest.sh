# Runs in the guest, on the host's file system: brings up the network and one Soft-RoCE device for each rail, then does the job.
# One machine alone has rails that lead back to itself; two have one cable for each rail and another one, `lan`, that stays.
source /run/job/environment
ulimit -l unlimited
ip link set lo up
for ((rail = 0; rail < RAILS; rail++)); do
    if ((NODES == 1)); then
        ip link add "rail$rail" type dummy
    else
        ip link set "eth$rail" name "rail$rail"
    fi
    # Room for RoCE's largest packet, which carries 4096 bytes.
    ip link set "rail$rail" mtu 4500 up
    ip address add "10.77.$rail.$((NODE + 1))/24" dev "rail$rail"
    rdma link add "rxe$rail" type rxe netdev "rail$rail"
done
if ((NODES > 1)); then
    ip link set "eth$RAILS" name lan
    ip link set lan up
    ip address add "10.76.0.$((NODE + 1))/24" dev lan
    # Two machines seldom boot equally fast; neither begins before the other is there.
    for ((second = 0; second < 60; second++)); do
        busybox ping -c 1 -W 1 "10.76.0.$((2 - NODE))" >/dev/null && break
    done
fi
# `cable RAIL up|down` plugs a rail's cable in or pulls it. Alone, a machine has no cables, and the interface itself goes down.
if ((NODES > 1)); then
    for port in /sys/class/virtio-ports/*; do
        [ "$(cat "$port/name")" = monitor ] && monitor=/dev/${port##*/}
    done
    cat >/usr/local/bin/cable <<END
#!/bin/bash
case \$2 in up) link=on carrier=1 ;; *) link=off carrier=0 ;; esac
echo "set_link cable\$1 \$link" >$monitor
for ((tenth = 0; tenth < 100; tenth++)); do
    [ "\$(cat /sys/class/net/rail\$1/carrier)" = \$carrier ] && exit
    sleep 0.1
done
exit 1
END
else
    printf '#!/bin/bash\nip link set "rail$1" "$2"\n' >/usr/local/bin/cable
fi
chmod +x /usr/local/bin/cable
cd "$PROJECT" || exit
source /run/job/command.sh
